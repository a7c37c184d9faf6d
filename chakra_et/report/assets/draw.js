// How the timeline is drawn: rows, dependencies and the critical path.

function drawTimeline(view) {
  const scale = devicePixelRatio || 1;
  const pen = view.canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.fillStyle = view.style.paper;
  pen.fillRect(0, 0, view.width, view.visible);
  pen.font = `11px ${colour("--sans")}`;
  pen.textBaseline = "middle";
  const lights = view.lit !== null ? view.lit : view.showsPath ? view.path : null;
  for (const line of view.lines) {
    const y = line.top + TOP - view.scroller.scrollTop;
    if (y + line.height < TOP || y > view.visible) continue;
    if (line.curve !== null) drawMemory(view, pen, line, y, line.height);
    else if (line.row < 0) drawHeader(view, pen, line, y, lights);
    else {
      const gap = line.height > STACK_ROW ? 1 : 0;
      drawRow(view, pen, line.row, y + gap, line.height - gap - 1, lights);
      drawLabel(view, pen, view.nodes.tables.rows[line.row][2], 14, y, line.height, view.style.muted);
    }
  }
  drawRules(view, pen);
  clip(pen, GUTTER, TOP, view.width - GUTTER, view.visible - TOP, () => {
    if (view.showsPath && view.path !== null) drawPath(view, pen);
    if (view.selected >= 0) drawEdges(view, pen, view.selected, 1);
    if (view.hovered >= 0 && view.hovered !== view.selected) drawEdges(view, pen, view.hovered, 0.8);
    for (const [node, width] of [[view.hovered, 1.5], [view.selected, 2.5]]) if (node >= 0) outline(view, pen, node, width);
  });
  drawRuler(view, pen);
  drawOverview(view, pen);
}

// Bold lines below some lanes, such as the last one of a pipeline stage.
function drawRules(view, pen) {
  const rules = new Set(view.nodes.tables.rules || []);
  pen.fillStyle = view.style.ink;
  for (const { rank, row, curve, bottom } of view.lines) {
    const y = bottom + TOP - view.scroller.scrollTop;
    if (row < 0 && curve === null && rules.has(rank) && y > TOP) pen.fillRect(0, y - 1.5, view.width, 3);
  }
}

function clip(pen, x, y, width, height, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  draw();
  pen.restore();
}

function drawLabel(view, pen, text, x, y, height, css) {
  pen.fillStyle = css;
  clip(pen, 0, Math.max(y, TOP), GUTTER - 6, y + height - Math.max(y, TOP), () => pen.fillText(text, x, y + height / 2));
}

function drawHeader(view, pen, line, y, lights) {
  pen.fillStyle = view.style.panel;
  pen.fillRect(0, y, view.width, line.height);
  drawLabel(view, pen, `${line.folded ? "▸" : "▾"} ${view.nodes.lane(line.rank)}`, 4, y, line.height, view.style.ink);
  const { unit } = view.nodes;
  if (line.folded) {
    for (let row = line.first; row < line.end; row++) {
      const { height } = view.lineOfRow[row];
      drawRow(view, pen, row, view.y(row), Math.max(1, height - (height > 4 ? 1 : 0)), lights);
    }
  }
  const bottom = Math.min(view.visible, y + line.bottom - line.top);
  clip(pen, GUTTER, TOP, view.width - GUTTER, view.visible - TOP, () => {
    for (const step of view.steps.get(line.rank) || []) {
      const left = view.x(step.start / unit), right = view.x(step.end / unit);
      if (right < GUTTER || left > view.width || right - left < 4) continue;
      pen.fillStyle = view.style.line;
      pen.fillRect(left, y, 1, bottom - y);
      pen.fillRect(right, y, 1, bottom - y);
      if (line.folded || right - left < 60) continue;
      pen.fillStyle = view.style.muted;
      clip(pen, Math.max(left, GUTTER), y, right - Math.max(left, GUTTER), HEADER, () =>
        pen.fillText(`${stepTitle(step.name)} · ${duration(step.end - step.start)}`, Math.max(left, GUTTER) + 5, y + HEADER / 2));
    }
  });
  const note = view.nodes.tables.notes?.[line.rank];
  if (note && !line.folded) drawNote(view, pen, note, y, line.height);
}

// A few words about a lane, such as its idle time, at its right end.
function drawNote(view, pen, text, y, height) {
  const width = pen.measureText(text).width + 12;
  pen.fillStyle = view.style.panel;
  clip(pen, view.width - width, TOP, width, view.visible - TOP, () => {
    pen.fillRect(view.width - width, y, width, height);
    pen.fillStyle = view.style.ink;
    pen.fillText(text, view.width - width + 6, y + height / 2);
  });
}

function drawRow(view, pen, row, y, height, lights) {
  const level = view.levels.forPixel(view.pixel);
  const { nodes } = view;
  const right = view.width, top = Math.max(y, TOP);
  if (top >= y + height) return;
  const room = y + height - top;
  const begin = firstInWindow(level, row, view.from);
  pen.globalAlpha = lights === null ? 1 : 0.22;
  let css = "";
  for (let at = begin; at < level.first[row + 1]; at++) {
    const x = view.x(level.start[at]);
    if (x > right) break;
    const left = Math.max(x, GUTTER), width = view.x(level.end[at]) - left;
    if (width < 0) continue;
    const node = level.node[at], wanted = view.colourOf(node);
    if (wanted !== css) pen.fillStyle = css = wanted;
    const extent = level.end[at] - level.start[at];
    const thin = extent > 0 && level.busy[at] < 0.9 * extent;
    if (thin && lights === null) pen.globalAlpha = 0.35 + 0.65 * level.busy[at] / extent;
    pen.fillRect(left, top, Math.max(width - (width > 3 ? 0.7 : 0), 0.8), room);
    if (thin && lights === null) pen.globalAlpha = 1;
    if (width > 3 && height > 8) drawInside(view, pen, node, left, width, y, height, () => { css = ""; });
  }
  pen.globalAlpha = 1;
  if (lights !== null) drawLights(view, pen, row, top, room, lights);
}

function drawInside(view, pen, node, left, width, y, height, changed) {
  const wait = view.nodes.wait(node);
  if (wait > 0) {
    const end = Math.min(view.x(view.nodes.start[node] + wait), left + width);
    if (end > left) {
      pen.fillStyle = view.style.wait;
      pen.fillRect(left, Math.max(y, TOP), end - left, height);
      changed();
    }
  }
  const letters = Math.floor((width - 6) / 6);
  if (letters < 3) return;
  const title = view.nodes.title(node);
  pen.fillStyle = "#fff";
  changed();
  clip(pen, left, Math.max(y, TOP), width, y + height - Math.max(y, TOP), () =>
    pen.fillText(title.length > letters ? title.slice(0, letters) : title, left + 4, y + height / 2 + 0.5));
}

function firstInWindow(level, row, from) {
  const at = lowerBound(level.start, from, level.first[row], level.first[row + 1]);
  let begin = at;
  // Few nodes overlap, so what reaches into the window from before begins shortly before it.
  for (let back = at - 1; back >= Math.max(level.first[row], at - 16); back--) if (level.end[back] >= from) begin = back;
  return begin;
}

// Nodes that are lit (found by search, or on the critical path) in full colour, at least two pixels wide.
function drawLights(view, pen, row, top, room, lights) {
  const { nodes } = view;
  const end = nodes.rowFirst[row + 1];
  let painted = -1;
  for (let at = lowerBound(lights, nodes.rowFirst[row]); at < lights.length && lights[at] < end; at++) {
    const node = lights[at], x = view.x(nodes.start[node]), far = view.x(nodes.end(node));
    if (x > view.width) break;
    if (far < GUTTER || far < painted) continue;
    const left = Math.max(x, GUTTER);
    painted = Math.max(far, left + 2);
    pen.fillStyle = view.colourOf(node);
    pen.fillRect(left, top, painted - left, room);
    if (far - left > 30 && room > 8) drawInside(view, pen, node, left, far - left, top, room, () => {});
  }
}

function drawPath(view, pen) {
  const { path } = view.nodes.columns;
  pen.strokeStyle = view.style.path;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (let at = 1; at < path.length; at++) {
    const [a, b] = [path[at - 1], path[at]];
    if (view.nodes.row[a] === view.nodes.row[b]) continue;
    const x = view.x(view.nodes.columns.path_from[at]);
    if (x < GUTTER - 50 || x > view.width + 50) continue;
    pen.moveTo(x, centre(view, a));
    pen.lineTo(x, centre(view, b));
  }
  pen.stroke();
}

function centre(view, node) {
  const { row } = view.nodes;
  return view.y(row[node]) + view.lineOfRow[row[node]].height / 2;
}

const MOST_EDGES = 200;

function drawEdges(view, pen, node, strength) {
  const { nodes } = view;
  pen.globalAlpha = strength;
  pen.lineWidth = 1.6;
  pen.strokeStyle = view.style.before;
  for (const { node: other } of nodes.dependencies(node).slice(0, MOST_EDGES)) curve(view, pen, other, node);
  pen.strokeStyle = view.style.after;
  for (const { node: other } of nodes.dependents(node).slice(0, MOST_EDGES)) curve(view, pen, node, other);
  pen.setLineDash([4, 3]);
  pen.strokeStyle = view.style.wait;
  const communication = nodes.communication(node);
  for (const peer of communication === null ? [] : communication.peers.slice(0, MOST_EDGES)) {
    pen.beginPath();
    pen.moveTo(view.x(nodes.end(node)), centre(view, node));
    pen.lineTo(view.x(nodes.end(peer)), centre(view, peer));
    pen.stroke();
  }
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

function curve(view, pen, before, after) {
  const x0 = view.x(view.nodes.end(before)), y0 = centre(view, before);
  const x1 = view.x(view.nodes.start[after]), y1 = centre(view, after);
  const bend = Math.min(60, Math.max(12, Math.abs(x1 - x0) / 2));
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  pen.stroke();
  pen.beginPath();
  pen.arc(x1, y1, 2.5, 0, 7);
  pen.fillStyle = pen.strokeStyle;
  pen.fill();
}

function outline(view, pen, node, width) {
  const line = view.lineOfRow[view.nodes.row[node]];
  if (line === undefined) return;
  const left = view.x(view.nodes.start[node]), right = view.x(view.nodes.end(node));
  pen.strokeStyle = view.style.ink;
  pen.lineWidth = width;
  pen.strokeRect(left, view.y(view.nodes.row[node]) + 0.5, Math.max(right - left, 2), line.height - 1);
}
