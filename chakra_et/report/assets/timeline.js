// The timeline's state: which stretch of time and which rows are shown, what is selected and lit. Times are in the
// units of the nodes' columns.

const GUTTER = 168, OVERVIEW = 34, RULER = 22, TOP = OVERVIEW + RULER, HEADER = 22, SQUASHED = 26;
const LOWEST_ROW = 19, HIGHEST_ROW = 34, HIGHEST = 560, STACK_ROW = 15;
// With more ranks than this, each begins as one line.
const MOST_OPEN = 16;
// With more ranks than this, call stacks begin hidden.
const MOST_WITH_STACKS = 2;
const SHADES = 5;

class Timeline {
  constructor(content, nodes) {
    this.content = content;
    this.nodes = nodes;
    this.levels = new Levels(nodes);
    this.curves = memoryCurves(nodes);
    this.steps = byRank(content.steps);
    this.from = 0;
    this.to = nodes.last;
    this.hovered = -1;
    this.selected = -1;
    this.colouring = "kind";
    this.lit = null;
    this.showsPath = false;
    this.folded = new Set();
    const ranks = new Set(nodes.tables.rows.map(([rank]) => rank));
    if (ranks.size > MOST_OPEN) this.folded = ranks;
    this.showsStacks = ranks.size <= MOST_WITH_STACKS;
    this.path = nodes.columns.path ? Uint32Array.from(nodes.columns.path).sort().filter((node, at, all) => at === 0 || node !== all[at - 1]) : null;
    this.listeners = [];
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline of all ranks. Select a node to see its dependencies in the list beside it." });
    this.spacer = el("div", { class: "spacer" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.scroller = el("div", { class: "scroller" }, this.canvas, this.spacer);
    this.element = el("div", { class: "timeline" }, this.scroller, this.tip);
    // The timeline, and what is put beside it.
    this.frame = el("div", { class: "split" }, this.element);
    this.scroller.addEventListener("scroll", () => this.redraw());
    this.lines = [];
    this.layOut();
    new ResizeObserver(() => this.resize()).observe(this.scroller);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    matchMedia("print").addEventListener("change", () => { this.recolour(); this.draw(); });
    this.recolour();
  }

  // Lines from top to bottom: a header for each rank and its rows, or the header with all its rows squashed into it.
  layOut() {
    const { rows } = this.nodes.tables;
    const ranks = new Set(rows.map(([rank]) => rank)).size, flat = rows.filter(([, kind]) => kind !== "stack").length;
    this.rowHeight = Math.max(LOWEST_ROW, Math.min(HIGHEST_ROW, Math.floor((HIGHEST - TOP - HEADER * ranks - MEMORY_ROW * this.curves.length) / flat)));
    this.lines = [];
    this.lineOfRow = new Array(rows.length);
    let top = 0;
    for (let row = 0; row < rows.length;) {
      const rank = rows[row][0];
      let end = row;
      while (end < rows.length && rows[end][0] === rank && rows[end][1] !== "stack") end++;
      const folded = this.folded.has(rank);
      const header = { rank, top, height: folded ? SQUASHED : HEADER, first: row, end, folded, row: -1, curve: null };
      this.lines.push(header);
      top += header.height;
      for (; row < end; row++) {
        if (folded) {
          const each = (SQUASHED - 6) / (end - header.first);
          this.lineOfRow[row] = { row, top: header.top + 3 + (row - header.first) * each, height: each };
        } else {
          const line = { rank, row, top, height: this.rowHeight, curve: null };
          this.lines.push(line);
          this.lineOfRow[row] = line;
          top += this.rowHeight;
        }
      }
      for (const curve of folded ? [] : this.curves.filter(each => each.rank === rank)) {
        this.lines.push({ rank, row: -1, top, height: MEMORY_ROW, curve });
        top += MEMORY_ROW;
      }
      for (; row < rows.length && rows[row][0] === rank; row++) {
        if (folded || !this.showsStacks) continue;
        this.lineOfRow[row] = { rank, row, top, height: STACK_ROW, curve: null };
        this.lines.push(this.lineOfRow[row]);
        top += STACK_ROW;
      }
      header.bottom = top;
    }
    this.height = top;
    document.getElementById("stacks")?.setAttribute("aria-pressed", String(this.showsStacks));
    this.spacer.style.height = `${top}px`;
    this.frame.style.setProperty("--height", `${Math.min(HIGHEST, Math.max(300, top + TOP + 4))}px`);
    this.resize();
  }

  resize() {
    this.width = Math.max(this.scroller.clientWidth, GUTTER + 100);
    this.visible = Math.max(this.scroller.clientHeight, TOP + LOWEST_ROW);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.visible * scale);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.visible}px`;
    // The canvas stays in place while the lines scroll beneath the fixed top.
    this.spacer.style.marginTop = `${TOP - this.visible}px`;
    this.redraw();
  }

  recolour() {
    this.style = {};
    for (const name of ["ink", "muted", "line", "paper", "panel", "accent", "wait", "path", "before", "after", "found", "memory"]) this.style[name] = colour(`--${name}`);
    const { kinds, phases, colours } = this.nodes.tables;
    const several = css => Array.from({ length: SHADES }, (_, at) => colours ? css : shade(css, (at - 2) * 0.07));
    this.palettes = {
      kind: kinds.flatMap((kind, at) => several(colours ? colours[at] : colour(variable(kind)))),
      phase: [colour("--annotation"), ...phases.map(phase => colour(variable(phase)))],
      many: Array.from({ length: 12 }, (_, at) => colour(`--many-${at}`)),
    };
    this.redraw();
  }

  colourOf(node) {
    const { nodes, palettes } = this;
    if (this.colouring === "phase") return palettes.phase[nodes.phase[node]];
    if (this.colouring === "name") return palettes.many[nodes.name[node] % 12];
    if (this.colouring === "module") return nodes.module[node] === 0 ? palettes.phase[0] : palettes.many[nodes.module[node] % 12];
    return palettes.kind[nodes.kind[node] * SHADES + nodes.name[node] % SHADES];
  }

  x(time) { return GUTTER + (time - this.from) / (this.to - this.from) * (this.width - GUTTER); }
  time(x) { return this.from + (x - GUTTER) / (this.width - GUTTER) * (this.to - this.from); }
  get pixel() { return (this.to - this.from) / (this.width - GUTTER); }
  y(row) { return this.lineOfRow[row].top + TOP - this.scroller.scrollTop; }

  lineAt(y) {
    const at = y - TOP + this.scroller.scrollTop;
    return y < TOP ? null : this.lines.find(line => at >= line.top && at < line.top + line.height) || null;
  }

  nodeAt(x, y) {
    const line = this.lineAt(y);
    if (line === null || x < GUTTER) return -1;
    let { row } = line;
    if (row < 0) {
      if (!line.folded) return -1;
      const inside = y - TOP + this.scroller.scrollTop - line.top - 3;
      row = line.first + Math.floor(inside / ((SQUASHED - 6) / (line.end - line.first)));
      if (row < line.first || row >= line.end) return -1;
    }
    return this.nodes.find(row, this.time(x), 2 * this.pixel);
  }

  show(from, to) {
    const span = Math.min(Math.max(to - from, 4), this.nodes.last * 1.05);
    const middle = (from + to) / 2;
    const slack = 0.05 * span;
    this.from = Math.max(-slack, Math.min(middle - span / 2, this.nodes.last + slack - span));
    this.to = this.from + span;
    this.redraw();
  }

  zoom(factor, at = (this.from + this.to) / 2) { this.show(at - (at - this.from) * factor, at + (this.to - at) * factor); }
  pan(units) { this.show(this.from + units, this.to + units); }
  fit() { this.show(0, this.nodes.last); }

  // Where a node stands: its lane and the step that it begins in.
  place(node) {
    const rank = this.nodes.rank(node), at = this.nodes.ns(this.nodes.start[node]);
    const step = (this.steps.get(rank) || []).find(({ start, end }) => at >= start && at < end);
    return [this.nodes.lane(rank), ...(step ? [stepTitle(step.name)] : [])].join(", ");
  }

  select(node, reveal = false) {
    this.selected = node;
    if (node >= 0 && reveal) this.reveal(node);
    this.listeners.forEach(listener => listener(node));
    this.redraw();
  }

  // Bring a node into view, wide enough to be seen.
  reveal(node) {
    const { nodes } = this;
    const rank = nodes.rank(node);
    this.showsStacks ||= nodes.isSlice(node);
    this.folded.delete(rank);
    this.layOut();
    const start = nodes.start[node], length = nodes.length[node], middle = start + length / 2;
    let span = this.to - this.from;
    if (length / this.pixel < 12) span = Math.max(40 * length, 200);
    if (length > span) span = 1.4 * length;
    const inside = start >= this.from && start + length <= this.to;
    if (!inside || span !== this.to - this.from) this.show(middle - span / 2, middle + span / 2);
    this.scrollTo(node);
  }

  // Scroll up or down until a node's row is seen.
  scrollTo(node) {
    const line = this.lineOfRow[this.nodes.row[node]];
    const top = this.scroller.scrollTop, room = this.visible - TOP;
    if (line.top < top + HEADER || line.top + 2 * line.height > top + room) this.scroller.scrollTop = line.top - room / 2;
  }

  // The longest node of the critical path within what is shown, -1 for none.
  longestOnPath() {
    const { start, length } = this.nodes;
    const shown = node => start[node] < this.to && start[node] + length[node] > this.from;
    return this.path.reduce((most, node) => (shown(node) && (most < 0 || length[node] > length[most]) ? node : most), -1);
  }

  stacks(shown) {
    this.showsStacks = shown;
    if (this.selected >= 0 && this.nodes.isSlice(this.selected)) this.select(-1);
    this.hovered = -1;
    this.layOut();
  }

  fold(rank) {
    if (!this.folded.delete(rank)) this.folded.add(rank);
    this.layOut();
  }

  foldAll(folded) {
    this.folded = folded ? new Set(this.nodes.tables.rows.map(([rank]) => rank)) : new Set();
    this.layOut();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() { drawTimeline(this); }
}

function stepTitle(name) { return /^\d+$/.test(name) ? `step ${name}` : name; }

function byRank(steps) {
  const found = new Map();
  for (const [rank, name, start, end] of steps) {
    if (!found.has(rank)) found.set(rank, []);
    found.get(rank).push({ name, start, end });
  }
  return found;
}

// A colour "#rrggbb" made lighter (share above 0) or darker.
function shade(css, share) {
  const goal = share > 0 ? 255 : 0;
  const parts = [1, 3, 5].map(at => parseInt(css.slice(at, at + 2), 16));
  return `rgb(${parts.map(part => Math.round(part + (goal - part) * Math.abs(share))).join(",")})`;
}
