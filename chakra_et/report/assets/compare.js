// The page of several runs side by side, from what chakra_et/report/compare.py writes.

const NEW = "new", GONE = "gone";

function runTable(content) {
  const several = new Set(content.runs.map(run => run.ranks)).size > 1;
  const columns = [
    { name: "run", value: run => run.name }, { name: "ranks", value: run => run.ranks }, { name: "steps", value: run => run.steps || null },
    { name: "step", help: "mean step of the slowest rank", value: run => run.step_ns, text: run => duration(run.step_ns) },
    { name: "speed-up", help: "against the first run; the efficiency of weak scaling, where each rank has the same work in all runs", value: run => run.speedup, text: run => `×${run.speedup.toFixed(2)}` },
    ...(several ? [
      { name: "strong scaling", help: "efficiency if all ranks share the same work", value: run => run.strong_scaling, text: run => percent(run.strong_scaling) },
    ] : []),
    ...(content.runs.some(run => run.peak_bytes !== null)
      ? [{ name: "peak memory", help: "the most that one device of any rank had allocated", value: run => run.peak_bytes, text: run => bytes(run.peak_bytes) }] : []),
    ...content.activities.map((name, at) => ({ name, help: "mean over steps and ranks", value: run => run.parts_ns[at], text: run => duration(run.parts_ns[at]), share: run => run.parts_ns[at] / sum(run.parts_ns) })),
    { name: "hidden communication", value: run => run.hidden_ns, text: run => duration(run.hidden_ns) },
    ...content.phases.map((name, at) => ({ name, value: run => run.phases_ns[at], text: run => duration(run.phases_ns[at]) })),
  ];
  return sortableTable(columns, content.runs, { label: "runs" });
}

function changeColumns(names, times) {
  const first = row => times(row)[0], last = row => times(row)[names.length - 1];
  const difference = row => (last(row) || 0) - (first(row) || 0);
  const ratio = row => first(row) && last(row) ? last(row) / first(row) : null;
  const word = row => first(row) === null ? NEW : last(row) === null ? GONE : "–";
  return [
    ...names.map((name, at) => ({ name, value: row => times(row)[at], text: row => duration(times(row)[at]) })),
    { name: "difference", help: "last run minus first, per step and rank; sorted by its size", value: row => Math.abs(difference(row)), text: row => change(difference(row)),
      node: row => el("span", { class: difference(row) > 0 ? "slower" : "faster" }, change(difference(row))) },
    { name: "ratio", help: "last run over first", value: ratio, text: row => ratio(row) === null ? word(row) : `×${ratio(row).toFixed(2)}` },
  ];
}

function change(ns) { return ns === 0 ? "0" : `${ns > 0 ? "+" : "−"}${duration(Math.abs(ns))}`; }

function matchedTable(content, rows, label, times) {
  const names = content.runs.map(run => run.name);
  const columns = [{ name: "name", value: row => row[1] }, ...changeColumns(names, times),
    { name: "count", help: "per step and rank: first run, last run", value: row => row[4][names.length - 1],
      text: row => [row[4][0], row[4][names.length - 1]].map(each => each === null ? "–" : Number.isInteger(each) ? count(each) : digits(each)).join(" → ") }];
  return el("div", {}, sortableTable(columns, rows, { sorted: names.length + 1, filter: `filter ${label}`, label }), partners(names, rows, times));
}

// What of a table both runs have, and what only one of them, so that nothing is nowhere.
function partners(names, rows, times) {
  const last = names.length - 1, groups = [
    ["in both", row => times(row)[0] !== null && times(row)[last] !== null],
    [`only in ${names[0]}`, row => times(row)[0] !== null && times(row)[last] === null],
    [`only in ${names[last]}`, row => times(row)[0] === null && times(row)[last] !== null], ["all", () => true],
  ].map(([name, of]) => [name, rows.filter(of)]).filter(([, of]) => of.length > 0)
    .map(([name, of]) => ({ name, count: of.length, times: [0, last].map(at => sum(of.map(row => times(row)[at] || 0))) }));
  return el("div", {}, el("h3", {}, "Partners"), sortableTable([
    { name: "rows", value: row => row.name }, { name: "number", value: row => row.count },
    ...[0, 1].map(at => ({ name: names[at * last], value: row => row.times[at], text: row => duration(row.times[at]) })),
    { name: "difference", value: row => row.times[1] - row.times[0], text: row => change(row.times[1] - row.times[0]) },
  ], groups, { label: "partners" }));
}

function changes(content) {
  const of = kinds => content.entries.filter(([kind]) => kinds.includes(kind));
  const self = row => row[2], device = row => row[3];
  const launching = of(["operator"]).filter(row => row[3].some(Boolean));
  const views = [["operators: device time", launching, device], ["operators: self time on the host", of(["operator"]), self],
    ["kernels and copies", of(["kernel", "copy"]), self], ["communication", of(["transfer"]), self], ["runtime calls", of(["runtime"]), self],
    ["overhead", of(["host overhead", "device overhead"]), self]]
    .filter(([, rows]) => rows.length > 0).map(([name, rows, times]) => [name, () => matchedTable(content, rows, name, times)]);
  if (content.classes.length > 0) views.unshift(["classes of kernels", () => matchedTable(content, content.classes, "classes of kernels", self)]);
  for (const [name, rows] of [["modules", content.modules], ["call tree", content.calls]]) {
    if (rows.length > 0) views.push([name, () => treeChanges(content, rows, name)]);
  }
  return el("section", { id: "changes" }, el("h2", {}, "What changed"), el("p", { class: "muted" },
    "Per step and rank, matched by name, calls by the path to them. Kernels have other names on other devices: compare their classes, or the device time of the operators that launched them."), tabbed(views));
}

function treeChanges(content, matched, label) {
  const device = matched.some(row => row[3].some(Boolean));
  const times = row => device ? row[3] : row[2];
  const rows = matched.map(row => ({ path: row[1], times: times(row).map(time => time || 0) }));
  const last = content.runs.length - 1;
  const figures = content.runs.map((run, at) => ({ name: run.name, of: row => row.times[at], text: duration }));
  figures.unshift({ name: "difference", of: row => row.times[last] - row.times[0], text: change });
  return el("div", {}, el("p", { class: "muted" }, device ? "Device time per step and rank." : "Host time per step and rank."), treeTable(rows, figures, { label }));
}

async function main() {
  const { content } = await readData();
  const names = content.runs.map(run => run.name);
  const bars = content.runs.map(run => ({ label: run.name, parts: run.parts_ns, note: `${duration(sum(run.parts_ns))}, mean of the ranks` }));
  const last = content.runs[content.runs.length - 1];
  document.getElementById("page").replaceChildren(
    el("header", {}, el("div", {}, el("h1", {}, names.join(" · ")), el("p", { class: "muted" }, `${names.length} runs compared with ${names[0]}`)),
      el("nav", {}, themeButton(() => {}))),
    el("section", { id: "summary" },
      el("p", { class: "lead" }, `${last.name}: ${duration(last.step_ns)} per step, ${last.speedup >= 1 ? `${last.speedup.toFixed(2)} times as fast as` : `${(1 / last.speedup).toFixed(2)} times as long as`} ${names[0]} (${duration(content.runs[0].step_ns)}).`),
      content.notes.length === 0 ? null : el("div", { class: "lacks" }, el("ul", {}, ...content.notes.map(text => el("li", {}, text)))),
      el("div", { class: "wide" }, legend(content.activities.map(name => [name, `var(${variable(name)})`])), stackedBars(bars, content.activities)), runTable(content)),
    changes(content),
    el("section", { id: "runs" }, el("h2", {}, "The runs"), ...content.runs.map(run => el("details", {}, el("summary", {}, run.name),
      el("dl", {}, ...run.facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
      run.lacks.length === 0 ? null : el("ul", {}, ...run.lacks.map(text => el("li", {}, text)))))),
    el("footer", { class: "muted" }, `Made by ${content.made_by}.`));
  globalThis.chakraReport = { content };
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}
