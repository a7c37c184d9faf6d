// The page of one run.

function communication(content) {
  if (content.collectives.length === 0) return section("communication", "Communication", el("p", { class: "muted" }, "This run has no communication."));
  const ranks = content.ranks.map(rank => `${rank.rank}`);
  const worst = row => Object.entries(row.last).sort(([, a], [, b]) => b - a)[0];
  const columns = [
    { name: "type", value: row => row.type }, { name: "bytes", help: "of the whole buffer, as in nccl-tests", value: row => row.bytes, text: row => bytes(row.bytes) },
    { name: "group", value: row => row.group }, { name: "ranks", value: row => row.ranks }, { name: "count", value: row => row.count },
    { name: "transfer", help: "mean, once all ranks have arrived", value: row => row.transfer_ns, text: row => duration(row.transfer_ns) },
    { name: "algorithm bandwidth", help: "bytes / transfer time", value: row => row.algorithm, text: row => row.algorithm === null ? "–" : rate(row.algorithm * 1e9, "B/s") },
    { name: "bus bandwidth", help: "what a link carries: algorithm bandwidth × the factor of nccl-tests", value: row => row.bus, text: row => row.bus === null ? "–" : rate(row.bus * 1e9, "B/s") },
    { name: "usual", help: `bus bandwidth that NCCL reaches at this size among ${content.gpu || "such"} GPUs of one node`, value: row => row.usual_bus, text: row => row.usual_bus === null ? "–" : rate(row.usual_bus * 1e9, "B/s") },
    { name: "skew", help: "mean time from the first to the last arrival", value: row => row.skew_ns ? row.skew_ns[0] : null, text: row => duration(row.skew_ns ? row.skew_ns[0] : null) },
    { name: "most skew", value: row => row.skew_ns ? row.skew_ns[1] : null, text: row => duration(row.skew_ns ? row.skew_ns[1] : null) },
    { name: "last rank", help: "the rank that came last most often", value: row => worst(row) ? worst(row)[1] : null,
      text: row => worst(row) ? `${worst(row)[0]} (${worst(row)[1]} of ${row.count})` : "–" },
  ];
  const parts = [sortableTable(columns, content.collectives, { label: "collectives" })];
  const uneven = content.facts.find(([label]) => label === "uneven all-to-alls");
  if (uneven) parts.push(el("p", {}, `Uneven all-to-alls, as of experts: ${uneven[1]}.`));
  const grids = [];
  if (content.waits && content.waits.flat().some(Boolean)) grids.push(["Waiting", "time that the rank of the row waits for the rank of the column, if all begin together", content.waits, duration, "waits ↓ for →"]);
  const { messages, message_ns, collectives, collective_ns } = content.traffic || {};
  if (messages && messages.flat().some(Boolean)) grids.push(["Messages", "bytes sent by the rank of the row to the rank of the column", messages, bytes, "from ↓ to →"],
    ["Time of messages", "in which these are on their way", message_ns, duration, "from ↓ to →"]);
  if (collectives && collectives.flat().some(Boolean)) {
    grids.push(["Bytes in collectives", "if the library uses rings in order of ranks, and sends all-to-alls directly", collectives, bytes, "from ↓ to →"],
      ["Time of collectives", "without waiting for ranks", collective_ns, duration, "from ↓ to →"]);
  }
  parts.push(el("div", { class: "grids" }, ...grids.map(([title, note, values, text, corner]) =>
    el("div", {}, el("h3", {}, title), el("p", { class: "muted" }, note), heatMap(ranks, ranks, values, text, { corner, numbers: ranks.length <= 16 })))));
  return section("communication", "Communication", ...parts);
}

function timelineSection(content, view) {
  view.frame.append(detailsPanel(view));
  const kinds = [...new Set(content.entries.map(entry => entry[0])), ...(view.nodes.slices > 0 ? ["annotation", "python"] : [])].map(kind => [kind, `var(${variable(kind)})`]);
  return section("timeline", "Timeline", toolbar(view), view.frame,
    legend([...kinds, ["waits for other ranks", "var(--wait)"], ["waits for", "var(--before)"], ["leads to", "var(--after)"],
      ...(content.memory.length > 0 ? [["memory allocated", "var(--memory)"], ["reserved", "var(--ink)"]] : [])]));
}

async function main() {
  const page = document.getElementById("page");
  const { content, columns } = await readData();
  const view = new Timeline(content, new Nodes(content.timeline, columns));
  const search = text => {
    const input = document.getElementById("search");
    input.value = text;
    input.dispatchEvent(new Event("input"));
    document.getElementById("timeline").scrollIntoView({ behavior: "smooth" });
  };
  const go = ns => {
    const middle = ns / view.nodes.unit, half = view.nodes.last / 100;
    view.show(middle - half, middle + half);
    document.getElementById("timeline").scrollIntoView({ behavior: "smooth" });
  };
  const sections = [["Summary", summary(content)], ["Timeline", timelineSection(content, view)], ["Where the time went", breakdown(content)],
    ["Operators", operators(content, search)], ["Memory", memorySection(content, go)], ["Communication", communication(content)]]
    .filter(([, element]) => element !== null);
  const links = sections.map(([name, element]) => el("a", { href: `#${element.id}` }, name));
  page.replaceChildren(
    el("header", {}, el("div", {}, el("h1", {}, content.name), el("p", { class: "muted" }, `Chakra execution trace, ${content.base} times`)),
      el("nav", {}, ...links, themeButton(() => view.recolour()))),
    ...sections.map(([, element]) => element),
    el("footer", { class: "muted" }, `Made by ${content.made_by} from ${plural(view.nodes.count - view.nodes.slices, "node")} of ${plural(content.ranks.length, "rank")}.`));
  listen(view);
  view.layOut();
  view.draw();  // For tests and for those who want to script the page.
  globalThis.chakraReport = { content, view };
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}
