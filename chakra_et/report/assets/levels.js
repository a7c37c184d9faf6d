// Levels of detail: at level k, neighbours that fit into 4^k units are one block, so that no more blocks are drawn than
// there are pixels. A block is shown as the longest of its nodes.

const FACTOR = 4;

class Levels {
  constructor(nodes) {
    this.rows = nodes.tables.rows.length;
    const end = new Uint32Array(nodes.count), node = new Uint32Array(nodes.count);
    for (let at = 0; at < nodes.count; at++) {
      end[at] = nodes.start[at] + nodes.length[at];
      node[at] = at;
    }
    this.length = nodes.length;
    this.levels = [{ first: nodes.rowFirst, start: nodes.start, end, busy: nodes.length, node }];
  }

  // The level whose blocks hide nothing that is wider than a pixel of so many units.
  forPixel(units) {
    const wanted = units < 1 ? 0 : Math.floor(Math.log(units) / Math.log(FACTOR) + 1e-9) + 1;
    while (this.levels.length <= wanted && this.levels.length < 17) {
      this.levels.push(this.coarser(this.levels[this.levels.length - 1], FACTOR ** (this.levels.length - 1)));
    }
    return this.levels[Math.min(wanted, this.levels.length - 1)];
  }

  coarser(finer, size) {
    const most = finer.start.length;
    const level = { first: new Uint32Array(this.rows + 1) };
    for (const name of ["start", "end", "busy", "node"]) level[name] = new Uint32Array(most);
    let block = -1;
    for (let row = 0; row < this.rows; row++) {
      level.first[row] = block + 1;
      let open = false;
      for (let at = finer.first[row]; at < finer.first[row + 1]; at++) {
        if (open && finer.end[at] - level.start[block] <= size) {
          level.end[block] = Math.max(level.end[block], finer.end[at]);
          level.busy[block] += finer.busy[at];
          if (this.length[finer.node[at]] > this.length[level.node[block]]) level.node[block] = finer.node[at];
          continue;
        }
        block++;
        for (const name of ["start", "end", "busy", "node"]) level[name][block] = finer[name][at];
        open = true;
      }
    }
    level.first[this.rows] = block + 1;
    for (const name of ["start", "end", "busy", "node"]) level[name] = level[name].slice(0, block + 1);
    return level;
  }
}
