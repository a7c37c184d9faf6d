// The sections of the page of one run, each from the content that chakra_et/report/content.py writes.

function section(id, title, ...children) {
  return el("section", { id }, el("h2", {}, title), ...children);
}

function summary(content) {
  const [first, ...rest] = content.headline;
  return el("section", { id: "summary" },
    el("p", { class: "lead" }, first),
    el("ul", { class: "headline" }, ...rest.map(text => el("li", {}, text))),
    content.lacks.length === 0 ? null : el("details", { class: "lacks", open: content.lacks.length < 6 },
      el("summary", {}, `What this page lacks (${content.lacks.length})`), el("ul", {}, ...content.lacks.map(text => el("li", {}, text)))),
    content.facts.length === 0 ? null : el("details", { class: "facts" }, el("summary", {}, "What ran"),
      el("dl", {}, ...content.facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]))),
    verdicts(content));
}

function verdicts(content) {
  const good = content.ranks.filter(rank => verdict(rank) === "good").length;
  if (content.ranks.every(rank => verdict(rank) === "unknown")) {
    return el("p", { class: "muted" }, "No measurement confirms these times: the ranks were planned, or their traces have no start times.");
  }
  const columns = [
    { name: "rank", value: rank => rank.rank },
    { name: "verdict", value: verdict, node: verdictNode },
    ...(content.ranks.some(rank => rank.device) ? [{ name: "device", value: rank => rank.device }] : []),
    { name: "nodes", value: rank => rank.nodes },
    { name: "linked", help: "host operators found in the device trace", value: rank => rank.linked, text: rank => percent(rank.linked, 1) },
    { name: "left out", help: "events that the conversion left out", value: rank => rank.left_out },
    { name: "measured", value: rank => rank.measured_ns, text: rank => duration(rank.measured_ns) },
    { name: "replayed", help: "the same nodes, run by their dependencies and durations alone", value: rank => rank.replayed_ns, text: rank => duration(rank.replayed_ns) },
    { name: "error", help: "replayed against measured time", value: rank => rank.replay_error, text: rank => signed(rank.replay_error) },
    { name: "overhead", help: "part of the rank's critical path between operators, calls, kernels and communication: on the host mostly Python", value: rank => rank.overhead, text: rank => percent(rank.overhead, 1) },
  ];
  return el("div", {}, el("h3", {}, `How far each rank's trace can be trusted: ${good} of ${content.ranks.length} good`),
    sortableTable(columns, content.ranks, { label: "verdict per rank", limit: 16 }));
}

// "unknown" where nothing was measured that could confirm a trace: a planned run, or one without start times.
function verdict(rank) {
  if (rank.reasons.length > 0) return "check";
  return [rank.linked, rank.replay_error, rank.overhead].every(figure => figure === null) ? "unknown" : "good";
}

function verdictNode(rank) {
  const notes = rank.findings.map(([kind, text, number]) => `${kind}: ${text} (${count(number)})`);
  const badge = el("span", { class: `badge ${verdict(rank)}` }, verdict(rank));
  if (rank.reasons.length + notes.length === 0) return badge;
  const lines = [...rank.reasons, ...notes].map(text => el("li", {}, text));
  return el("details", { class: "reasons" }, el("summary", {}, badge, rank.reasons.length > 0 ? ` ${rank.reasons[0]}` : ""), el("ul", {}, ...lines));
}

const HELP = {
  compute: "a kernel runs; on a rank without device work, an operator",
  memory: "a copy or memset runs, and no kernel",
  communication: "exposed communication: data is on its way, and no kernel or copy runs",
  wait: "a communication waits for another rank to arrive",
  host: "threads are busy while the device has nothing to do; without device work, time outside of operators",
  idle: "none of these",
};

const BY_STEP = "by step";

function breakdown(content) {
  const steps = content.steps.map(([rank, step, start, end, parts, hidden, phases, replayed]) =>
    ({ rank, step, lasts: end - start, parts, hidden, phases, replayed }));
  const choice = el("div"), several = new Set(steps.map(step => step.step)).size > 1;
  const names = [...new Set(steps.map(step => step.step))];
  const select = el("select", { "aria-label": "step", onchange: () => fill() }, el("option", { value: "" }, "by rank, mean step"),
    el("option", { value: BY_STEP }, "by step, mean rank"), ...names.slice(0, 200).map(name => el("option", { value: name }, `by rank, step ${name}`)));

  function fill() {
    const bySteps = select.value === BY_STEP;
    const chosen = bySteps || select.value === "" ? steps : steps.filter(step => step.step === select.value);
    const groups = Map.groupBy(chosen, step => bySteps ? `step ${step.step}` : `rank ${step.rank}`);
    choice.replaceChildren(stackedBars([...groups].map(([label, own]) => mean(label, own, content)), content.activities));
  }
  fill();
  const phases = phaseBars(content, steps);
  return section("breakdown", "Where the time went",
    el("div", { class: "toolbar" }, legend(content.activities.map(name => [name, `var(${variable(name)})`, HELP[name]])), el("span", { class: "space" }), several ? select : null),
    choice,
    el("p", { class: "muted" }, "Each moment counts once, for the first that applies: compute, memory, exposed communication, wait, host, idle. The mark on a bar is the replayed time."),
    idleBars(content), phases, pathBar(content), stepTable(content, steps));
}

function mean(label, own, content) {
  const average = values => sum(values) / own.length;
  const replayed = own.every(step => step.replayed !== null) ? average(own.map(step => step.replayed)) : null;
  const parts = content.activities.map((_, at) => average(own.map(step => step.parts[at])));
  const marks = replayed === null ? [] : [[replayed, `replayed: ${duration(replayed)}`]];
  return { label, parts, marks, note: duration(sum(parts)), hints: { wait: waitedFor(content, own[0].rank) } };
}

// Which rank a rank waited for most, over the whole run.
function waitedFor(content, rank) {
  const waits = content.waits?.[content.ranks.findIndex(each => each.rank === rank)];
  const total = waits ? sum(waits) : 0;
  if (total === 0) return "";
  const most = waits.indexOf(Math.max(...waits));
  return `; ${percent(waits[most] / total)} of all waiting of rank ${rank} was for rank ${content.ranks[most].rank}`;
}

const IDLE = ["waits for a launch", "waits for other work", "gap between kernels"];

// Why devices do nothing between their first and their last work.
function idleBars({ idle, ranks }) {
  if (!idle || idle.flat().every(ns => ns === 0)) return null;
  const rows = idle.map((parts, at) => ({ label: `rank ${ranks[at].rank}`, parts }));
  return el("div", {}, el("h3", {}, "Why the device is idle"), legend(IDLE.map(name => [name, `var(${variable(name)})`])),
    stackedBars(rows, IDLE), el("p", { class: "muted" }, "Whole run. The next kernel was launched too late; or it was queued and waited for an event, another stream or another rank; or up to 10 µs pass between kernels."));
}

function phaseBars(content, steps) {
  if (steps.every(step => sum(step.phases) === 0)) return null;
  const rows = [...Map.groupBy(steps, step => step.rank)].map(([rank, own]) => ({
    label: `rank ${rank}`, parts: content.phases.map((_, at) => sum(own.map(step => step.phases[at])) / own.length),
  }));
  return el("div", {}, el("h3", {}, "Forward, backward, optimizer"), legend(content.phases.map(name => [name, `var(${variable(name)})`])),
    stackedBars(rows, content.phases), el("p", { class: "muted" }, "Per step: the time in which work or transfers of a phase run. Phases may overlap."));
}

function pathBar(content) {
  const kinds = Object.keys(content.path).filter(kind => content.path[kind] > 0);
  if (kinds.length === 0) return null;
  return el("div", {}, el("h3", {}, content.ranks.length > 1 ? "Critical path across ranks" : "Critical path"), legend(kinds.map(kind => [kind, `var(${variable(kind)})`])),
    stackedBars([{ label: content.ranks.length > 1 ? "all ranks" : `rank ${content.ranks[0].rank}`, parts: kinds.map(kind => content.path[kind]) }], kinds));
}

function stepTable(content, steps) {
  const columns = [
    { name: "rank", value: step => step.rank }, { name: "step", value: step => step.step },
    { name: content.base === "measured" ? "measured" : content.base, value: step => step.lasts, text: step => duration(step.lasts) },
    { name: "replayed", value: step => step.replayed, text: step => duration(step.replayed) },
    ...content.activities.map((name, at) => ({
      name, help: HELP[name], value: step => step.parts[at], text: step => duration(step.parts[at]), share: step => step.parts[at] / step.lasts,
    })),
    { name: "hidden communication", help: "communication behind compute or copies", value: step => step.hidden, text: step => duration(step.hidden) },
    ...content.phases.map((name, at) => ({ name, value: step => step.phases[at], text: step => duration(step.phases[at]), known: steps.some(step => step.phases[at] > 0) }))
      .filter(column => column.known),
  ];
  return el("details", { open: steps.length <= 16 }, el("summary", {}, "Every step of every rank"), sortableTable(columns, steps, { label: "steps", limit: 32 }));
}

const ENTRY = ["kind", "name", "count", "self", "longest", "device", "ranks", "flops", "bytes", "work", "ofPeak", "usual"];
const CLASS = ["kind", "count", "self", "share", "flops", "bytes", "ofPeak", "usual"];
const MODULE = ["path", "count", "host", "device", "communication", "phases"];

function named(fields, rows) {
  return rows.map(row => Object.fromEntries(fields.map((name, at) => [name, row[at]])));
}

// search: a function that lights the nodes of a name in the timeline.
function operators(content, search) {
  const entries = named(ENTRY, content.entries);
  const kinds = new Set(entries.map(entry => entry.kind));
  const host = ["operators", ["operator"]], device = ["kernels and copies", ["kernel", "copy"]];
  const tabs = [...(kinds.has("kernel") ? [device, host] : [host, device]), ["communication", ["transfer"]],
    ["runtime calls", ["runtime"]], ["overhead", ["host overhead", "device overhead"]]].filter(([, of]) => of.some(kind => kinds.has(kind)));
  const views = tabs.map(([name, of]) => [name, () => entryTable(content, entries.filter(entry => of.includes(entry.kind)), name, search)]);
  if (content.kernel_classes.length > 0) views.unshift(["classes of kernels", () => kernelClasses(content)]);
  if (content.calls.length > 0) views.push(["flame", () => flame(content)]);
  if (content.modules.length > 0) views.push(["modules", () => moduleTree(content)]);
  return section("operators", "Operators, kernels and modules", tabbed(views));
}

function entryTable(content, entries, label, search) {
  const total = sum(entries.map(entry => entry.self)) || 1;
  const columns = [
    { name: "name", value: entry => entry.name, text: entry => entry.name },
    { name: "count", value: entry => entry.count },
    { name: label === "operators" ? "self time" : "time", help: "all ranks and steps", value: entry => entry.self, text: entry => duration(entry.self), share: entry => entry.self / total },
    { name: "share", value: entry => entry.self / total, text: entry => percent(entry.self / total, 1) },
    { name: "mean", value: entry => entry.self / Math.max(1, entry.count), text: entry => duration(entry.self / Math.max(1, entry.count)) },
    { name: "longest", value: entry => entry.longest, text: entry => duration(entry.longest) },
  ];
  if (entries.some(entry => entry.device > 0)) {
    columns.push({ name: "device time", help: "of the kernels and copies that it launched itself", value: entry => entry.device, text: entry => duration(entry.device) });
  }
  if (label === "kernels and copies" && entries.some(entry => entry.work)) columns.splice(1, 0, { name: "class", value: entry => entry.work || "", text: entry => entry.work || "–" });
  columns.push(...rateColumns(content, entries));
  if (content.ranks.length > 1) {
    const spread = entry => Math.max(...entry.ranks) / (sum(entry.ranks) / entry.ranks.length || 1);
    columns.push({ name: "slowest rank", help: "rank with the most time, and how many times the mean it has", value: spread,
      text: entry => `${content.ranks[entry.ranks.indexOf(Math.max(...entry.ranks))].rank} (×${spread(entry).toFixed(2)})` });
  }
  return sortableTable(columns, entries, { sorted: 2, filter: `filter ${label}`, label, onrow: entry => search(entry.name) });
}

// What device work achieves, as far as it is known: see chakra_et/report/rates.py.
function rateColumns({ gpu }, rows) {
  return [
    { name: "FLOP/s", value: row => row.flops, text: row => rate(row.flops, "FLOP/s") },
    { name: "bytes/s", value: row => row.bytes, text: row => rate(row.bytes, "B/s") },
    { name: "of peak", help: `of what ${gpu || "the GPU"} can do: arithmetic, or bytes where these bound it; ?: above it, so data is in a cache or counted too high`,
      value: row => row.ofPeak, text: row => percent(row.ofPeak) + (row.ofPeak > 1 ? " ?" : ""), share: row => row.ofPeak },
    { name: "× usual", help: `how many times as long as such work usually takes on ${gpu || "such a GPU"}`,
      value: row => row.usual, text: row => row.usual === null ? "–" : `×${row.usual.toFixed(2)}` },
  ].filter(column => rows.some(row => column.value(row) !== null && column.value(row) !== undefined));
}

// The classes of kernels, where time is against the roofline.
function kernelClasses(content) {
  const rows = named(CLASS, content.kernel_classes);
  const columns = [
    { name: "class", value: row => row.kind }, { name: "count", value: row => row.count },
    { name: "time", help: "all ranks and steps", value: row => row.self, text: row => duration(row.self) },
    { name: "share", value: row => row.share, text: row => percent(row.share, 1), share: row => row.share }, ...rateColumns(content, rows),
  ];
  return el("div", {}, el("p", { class: "muted" }, content.gpu
    ? `Against ${content.gpu}: the part of its peak that is reached, and how many times as long the work takes as it usually does there; – where shapes aren't recorded.`
    : "The files don't name a GPU that is known, so its peak isn't either."), sortableTable(columns, rows, { sorted: 2, label: "kernel classes" }), roofline(content, rows));
}

// Achieved FLOP/s over operations per byte, one dot for each class.
function roofline({ roof }, rows) {
  const dots = rows.filter(row => row.flops && row.bytes && row.ofPeak).map(row => [row, row.flops / row.bytes]);
  if (!roof || dots.length === 0) return null;
  const width = 640, height = 260, left = 60, bottom = 34, [peak, memory] = roof;
  const xs = [0.05, 2000], ys = [Math.min(peak / 1e4, ...dots.map(([row]) => row.flops / 3)), peak * 1.5];
  const at = (value, [low, high], length) => length * Math.log(Math.min(Math.max(value, low), high) / low) / Math.log(high / low);
  const x = value => left + at(value, xs, width - left - 10), y = value => height - bottom - at(value, ys, height - bottom - 10);
  const space = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstChild.namespaceURI;
  const svg = (tag, properties, ...children) => {
    const element = document.createElementNS(space, tag);
    Object.entries(properties).forEach(([name, value]) => element.setAttribute(name, value));
    element.append(...children);
    return element;
  };
  const line = [[xs[0], xs[0] * memory], [peak / memory, peak], [xs[1], peak]].map(([a, b]) => `${x(a)},${y(b)}`).join(" ");
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "roofline", role: "img", "aria-label": "roofline" },
    svg("polyline", { points: line, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }),
    svg("text", { x: x(xs[1]) - 4, y: y(peak) - 6, "text-anchor": "end" }, `${rate(peak, "FLOP/s")}, ${rate(memory, "B/s")}`),
    svg("text", { x: width - 10, y: height - 8, "text-anchor": "end" }, "operations per byte →"),
    svg("text", { x: 4, y: 14 }, "FLOP/s ↑"),
    ...dots.flatMap(([row, intensity]) => [
      svg("circle", { cx: x(intensity), cy: y(row.flops), r: 3 + 14 * Math.sqrt(row.share), fill: "var(--kernel)", "fill-opacity": 0.6 },
        svg("title", {}, `${row.kind}: ${rate(row.flops, "FLOP/s")}, ${digits(intensity)} operations per byte, ${percent(row.share)} of the time`)),
      svg("text", { x: x(intensity) + 8, y: y(row.flops) + 4 }, row.share >= 0.05 ? row.kind : ""),
    ]));
}

function moduleTree(content) {
  const rows = named(MODULE, content.modules);
  const figures = [["device", "device time", "kernels and copies"], ["host", "host time", "operators and calls"], ["communication", "communication", ""]]
    .filter(([name]) => rows.some(row => row[name] > 0)).map(([name, title, help]) => ({ name: title, help, of: row => row[name], text: duration }));
  content.phases.forEach((name, at) => {
    if (rows.some(row => row.phases[at] > 0)) figures.push({ name, of: row => row.phases[at], text: duration });
  });
  figures.push({ name: "operators", help: "calls", of: row => row.count, text: count });
  return treeTable(rows, figures, { label: "modules" });
}
