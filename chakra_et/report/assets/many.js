// The page of very many ranks, from what chakra_et/report/many.py writes.

const MOST_LINES = 480;

// A map of values in a canvas, as a table of so many cells would take too long. Of more rows than lines, a line has the largest.
function gridMap(rows, columns, value, text) {
  const lines = Math.min(rows, MOST_LINES), shown = [], of = [];
  for (let line = 0; line < lines; line++) {
    for (let column = 0; column < columns; column++) {
      let most = NaN, at = Math.floor(line * rows / lines);
      for (let row = at; row < Math.floor((line + 1) * rows / lines); row++) {
        if (!(value(row, column) <= most)) [most, at] = [value(row, column), row];
      }
      shown.push(most);
      of.push(at);
    }
  }
  const canvas = el("canvas", { class: "grid", width: columns, height: lines, style: `height: ${Math.max(24, Math.min(MOST_LINES, rows * 12))}px`, role: "img" });
  const sorted = shown.filter(Number.isFinite).sort((a, b) => a - b);
  const low = sorted[Math.floor(sorted.length * 0.05)] || 0, high = Math.max(sorted[sorted.length - 1] || 0, low * 1.02);
  const image = new ImageData(columns, lines);
  shown.forEach((each, at) => {
    const share = Math.max(0, Math.min(1, (each - low) / (high - low)));
    image.data.set([176, 42, 88, Number.isFinite(each) ? 12 + 243 * share : 0], 4 * at);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  const note = el("p", { class: "muted", "aria-live": "polite" }, "Point at a cell.");
  canvas.addEventListener("mousemove", event => {
    const box = canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top) / box.height * lines), column = Math.floor((event.clientX - box.left) / box.width * columns);
    if (line >= 0 && line < lines && column >= 0 && column < columns) note.textContent = text(of[line * columns + column], column);
  });
  return el("div", {}, canvas, note);
}

function stepMap({ ranks, steps, outliers }, own) {
  const body = el("div");
  const usual = steps.map((_, step) => median(ranks.map((_, rank) => own[rank * steps.length + step])));
  const excess = (rank, step) => own[rank * steps.length + step] / Math.max(1, usual[step]);
  const describe = (rank, step) => `rank ${ranks[rank]}, step ${steps[step]}: ${duration(own[rank * steps.length + step] * 1000)} of its own, ×${excess(rank, step).toFixed(2)} the median rank`;
  const totals = ranks.map((_, rank) => sum(steps.map((_, step) => own[rank * steps.length + step])));
  const slow = ranks.map((_, rank) => rank).sort((a, b) => totals[b] - totals[a]);
  const orders = { "by rank": ranks.map((_, rank) => rank), "slowest first": slow, "the 64 slowest": slow.slice(0, 64) };
  const select = el("select", { "aria-label": "order", onchange: () => fill() }, ...Object.keys(orders).map(name => el("option", { value: name }, name)));
  const fill = () => body.replaceChildren(gridMap(orders[select.value].length, steps.length,
    (row, column) => excess(orders[select.value][row], column), (row, column) => describe(orders[select.value][row], column)));
  fill();
  return section("steps", "Ranks and steps", el("p", { class: "muted" }, "A row for each rank, a column for each step: its own time against the median rank's in that step."), select, body);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function meshMaps({ ranks, steps, axes, mesh, node }, own) {
  const mean = rank => sum(steps.map((_, step) => own[rank * steps.length + step])) / steps.length;
  const at = new Map(ranks.map((rank, place) => [rank, place])), nodes = Math.ceil((Math.max(...ranks) + 1) / node);
  const of = (row, column) => at.has(column * node + row) ? mean(at.get(column * node + row)) : NaN;
  return section("mesh", "Mesh", el("p", { class: "muted" }, mesh ? `${mesh}. Mean own time of a step.` : "Mean own time of a step."),
    el("h3", {}, "Nodes"), el("p", { class: "muted" }, `A column for each ${node} ranks, a row for each place among them (rail).`),
    gridMap(node, nodes, of, (row, column) => `rank ${column * node + row}: ${Number.isFinite(of(row, column)) ? duration(of(row, column) * 1000) : "–"}`),
    ...axes.flatMap(({ axis, ns }) => [el("h3", {}, `By ${axis}`), gridMap(1, ns.length, (_, place) => ns[place] ?? NaN, (_, place) => `${axis} ${place}: ${duration(ns[place])}`)]));
}

async function main() {
  const { content, columns } = await readData();
  const outliers = sortableTable([
    { name: "rank", value: row => row.rank }, ...(content.mesh ? [{ name: "place", value: row => row.place }] : []),
    { name: "node", value: row => Math.floor(row.rank / content.node) },
    { name: "excess", help: "own time beyond the median rank's, in its median step", value: row => row.excess, text: row => percent(row.excess, 1) },
    { name: "deviations", help: "in scaled median absolute deviations", value: row => row.deviations, text: row => digits(row.deviations) },
    { name: "slow steps", value: row => row.steps }, { name: "mostly", value: row => row.mostly },
    { name: "open", value: row => `chakra-et report ${content.name}.${row.rank}.et` },
  ], content.outliers, { sorted: content.mesh ? 3 : 2, label: "outliers" });
  const beside = content.beside.map(({ rank, typical, parts_ns: parts }) => ({ label: `rank ${rank}${typical ? ", typical" : ""}`, parts }));
  const [lead, ...rest] = content.headline;
  document.getElementById("page").replaceChildren(
    el("header", {}, el("div", {}, el("h1", {}, content.name), el("p", { class: "muted" }, `${count(content.ranks.length)} ranks`)), el("nav", {}, themeButton(() => {}))),
    el("section", { id: "summary" }, el("p", { class: "lead" }, lead), el("ul", {}, ...rest.map(text => el("li", {}, text))),
      content.notes.length === 0 ? null : el("div", { class: "lacks" }, el("ul", {}, ...content.notes.map(text => el("li", {}, text))))),
    section("outliers", "Ranks that stand out", content.outliers.length > 0 ? outliers : el("p", { class: "muted" }, "None.")),
    section("beside", "The slowest ranks and typical ones", legend(content.parts.map(name => [name, `var(${variable(name)})`])), stackedBars(beside, content.parts)),
    stepMap(content, columns.own), meshMaps(content, columns.own),
    el("footer", { class: "muted" }, `Made by ${content.made_by}.`));
  globalThis.chakraReport = { content };
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}
