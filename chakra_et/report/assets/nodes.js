// The nodes of a run as columns: row by row of the timeline, and by start within a row.

class Nodes {
  constructor(tables, given) {
    // A page of schedules has lanes of bars alone.
    const zeros = new Uint8Array(given.row.length), none = new Uint32Array(0);
    const columns = { phase: zeros, module: zeros, parent: zeros, flags: zeros, degree: zeros, edge: none, edge_kind: none,
      work_node: none, comm_node: none, comm_wait: none, comm_operation: none, ...given };
    this.tables = { memory: [], phases: [], modules: [], edge_kinds: [], ...tables };
    this.columns = columns;
    this.count = columns.row.length;
    this.unit = tables.unit_ns;
    for (const name of ["row", "start", "length", "name", "kind", "phase", "module", "flags"]) this[name] = columns[name];
    this.rowFirst = firsts(columns.row, tables.rows.length);
    this.sourceFirst = offsets(columns.degree);
    this.source = distances(columns);
    this.hasEdges = this.source.length > 0;
    this.last = 1;
    for (let node = 0; node < this.count; node++) {
      const end = this.start[node] + this.length[node];
      if (end > this.last) this.last = end;
    }
    this.slices = 0;
    for (const flags of this.flags) this.slices += (flags & 4) >> 2;
  }

  // What only a selected node needs is made once it is asked for.
  get targets() { return this.reversed ||= reversed(this.source, this.sourceFirst, this.count); }
  get operations() { return this.groupedOperations ||= grouped(this.columns.comm_operation); }
  get pathAt() { return this.placesOnPath ||= new Map(Array.from(this.columns.path || [], (node, at) => [node, at])); }

  // A slice of a call stack, as the device trace has it; all others are nodes of the run's graph.
  isSlice(node) { return (this.flags[node] & 4) !== 0; }

  // The call that launched work of a device, which may have waited before; undefined for none.
  launchOf(node) {
    const waits = this.dependencies(node);
    const idle = waits.find(each => this.kindName(each.node) === "device overhead");
    return [...waits, ...(idle ? this.dependencies(idle.node) : [])].find(each => each.kind === "launch")?.node;
  }

  // The slices that are open in the thread of a host node, or of the call that launched it, from the outermost one on.
  stack(node) {
    const { rows } = this.tables;
    const [rank, kind, label] = rows[this.row[node]];
    const launch = kind === "cpu" || kind === "stack" ? node : this.launchOf(node);
    if (launch === undefined) return [];
    let row = this.row[node];
    if (kind === "stack") while (rows[row][2] === "") row--;
    else row = rows.findIndex(([of, what, text]) => of === rank && what === "stack" && text === rows[this.row[launch]][2].replace("thread", "calls of"));
    const found = [];
    for (let at = row; at >= 0 && at < rows.length && (at === row || (rows[at][1] === "stack" && rows[at][2] === "" && rows[at][0] === rank)); at++) {
      const slice = this.find(at, this.start[launch] + Math.min(1, this.length[launch] / 2), 0.5);
      if (slice >= 0 && slice !== node && this.length[slice] >= (kind === "stack" ? this.length[node] : 0)) found.push(slice);
    }
    return found;
  }

  end(node) { return this.start[node] + this.length[node]; }
  // The name of a rank's lanes; pages of schedules have names of their own.
  lane(rank) { return this.tables.lanes ? this.tables.lanes[rank] : `rank ${rank}`; }
  rank(node) { return this.tables.rows[this.row[node]][0]; }
  title(node) { return this.tables.names[this.name[node]]; }
  kindName(node) { return this.tables.kinds[this.kind[node]]; }
  ns(units) { return units * this.unit; }

  parent(node) {
    const distance = this.columns.parent[node];
    return distance === 0 ? -1 : (node - distance) >>> 0;
  }

  // [{node, kind, gap}]: what a node waits for (before), or what waits for it; gap: ns from one's end to the other's start.
  dependencies(node) {
    const found = [];
    for (let at = this.sourceFirst[node]; at < this.sourceFirst[node + 1]; at++) {
      const other = this.source[at];
      found.push({ node: other, kind: this.edgeName(at), gap: this.ns(this.start[node] - this.end(other)) });
    }
    return found.sort((a, b) => this.end(b.node) - this.end(a.node));
  }

  dependents(node) {
    const found = [], [first, target, edge] = this.targets;
    for (let at = first[node]; at < first[node + 1]; at++) {
      const other = target[at];
      found.push({ node: other, kind: this.edgeName(edge[at]), gap: this.ns(this.start[other] - this.end(node)) });
    }
    return found.sort((a, b) => this.start[a.node] - this.start[b.node]);
  }

  edgeName(edge) { return this.tables.edge_kinds[this.columns.edge_kind[edge]]; }

  // The communication of a node, null for none.
  communication(node) {
    const { comm_node, comm_type, comm_bytes, comm_group, comm_wait, comm_operation } = this.columns;
    const at = indexOf(comm_node, node);
    if (at < 0) return null;
    const peers = comm_operation[at] === 0 ? [] : this.operations.get(comm_operation[at]).map(each => comm_node[each]);
    return {
      type: this.tables.comm_types[comm_type[at]], bytes: comm_bytes[at], group: this.tables.groups[comm_group[at]],
      wait: this.ns(comm_wait[at]), peers: peers.filter(peer => peer !== node),
    };
  }

  // How long a communication waits, in units; 0 for all others.
  wait(node) {
    const at = indexOf(this.columns.comm_node, node);
    return at < 0 ? 0 : this.columns.comm_wait[at];
  }

  work(node) {
    const at = indexOf(this.columns.work_node, node);
    return at < 0 ? null : { operations: this.columns.work_ops[at], bytes: this.columns.work_bytes[at] };
  }

  // The node of a row that runs at a time, or the nearest one within reach; -1 for none.
  find(row, time, reach) {
    const first = this.rowFirst[row], end = this.rowFirst[row + 1];
    const next = lowerBound(this.start, time, first, end);
    let best = -1, nearest = reach;
    // Nodes are in order of start and hardly overlap: the one that runs at a time is among the last few before it.
    for (let node = Math.min(next + 1, end - 1); node >= Math.max(first, next - 4); node--) {
      const away = Math.max(this.start[node] - time, time - this.end(node), 0);
      if (away < nearest || (away === nearest && best < 0)) [best, nearest] = [node, away];
    }
    return best;
  }

  // The nodes whose name contains the text, or each of its words.
  search(text) {
    const words = text.toLowerCase().split(" ");
    const fits = this.tables.names.map(name => words.every(word => name.toLowerCase().includes(word)));
    const found = [];
    for (let node = 0; node < this.count; node++) if (fits[this.name[node]]) found.push(node);
    return found;
  }
}

// The first place from `low` on whose value is not below the wanted one.
function lowerBound(values, wanted, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

function indexOf(ascending, value) {
  const at = lowerBound(ascending, value);
  return at < ascending.length && ascending[at] === value ? at : -1;
}

// Where each of `count` groups begins in a column of ascending group numbers.
function firsts(column, count) {
  const first = new Uint32Array(count + 1);
  for (const value of column) first[value + 1]++;
  for (let at = 1; at <= count; at++) first[at] += first[at - 1];
  return first;
}

function offsets(lengths) {
  const first = new Uint32Array(lengths.length + 1);
  for (let at = 0; at < lengths.length; at++) first[at + 1] = first[at] + lengths[at];
  return first;
}

// The dependencies as node numbers; a column holds how many places before its node each stands.
function distances({ degree, edge }) {
  const source = new Uint32Array(edge.length);
  for (let node = 0, at = 0; node < degree.length; node++) {
    for (let left = degree[node]; left > 0; left--, at++) source[at] = node - edge[at];
  }
  return source;
}

function reversed(source, sourceFirst, count) {
  const first = firsts(source, count);
  const place = first.slice(), target = new Uint32Array(source.length), edge = new Uint32Array(source.length);
  for (let node = 0; node < count; node++) {
    for (let at = sourceFirst[node]; at < sourceFirst[node + 1]; at++) {
      const to = place[source[at]]++;
      target[to] = node;
      edge[to] = at;
    }
  }
  return [first, target, edge];
}

function grouped(numbers) {
  const groups = new Map();
  numbers.forEach((number, at) => {
    if (number === 0) return;
    if (!groups.has(number)) groups.set(number, []);
    groups.get(number).push(at);
  });
  return groups;
}
