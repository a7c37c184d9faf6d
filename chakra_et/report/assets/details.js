// The panel beside the timeline: the selected node, what it waits for and what waits for it; and the search.

const MOST_LINKS = 40;

function detailsPanel(view) {
  const panel = el("aside", { class: "details", "aria-live": "polite", "aria-label": "Selected node" });
  const show = node => panel.replaceChildren(...(node < 0 ? help(view) : describe(view, node)));
  view.listeners.push(show);
  show(-1);
  return panel;
}

function help({ nodes }) {
  const keys = [
    ["click", nodes.hasEdges ? "select a node and see its dependencies" : "select"], ["Ctrl + wheel, W, S", "zoom"], ["drag, shift + wheel, A, D", "move"],
    ["drag on the ruler", "zoom to a stretch"], ["double click", "zoom to a bar"],
    ...(nodes.hasEdges ? [["[ and ]", "go to what it waited for, or to what waits for it"]] : []),
    [", and .", "go to its neighbours"], ["0", "show everything"],
  ];
  return [el("h3", {}, "Timeline"), ...(nodes.hasEdges ? [el("p", { class: "muted" }, "Click a node to follow its dependencies from rank to rank.")] : []),
    el("dl", { class: "keys" }, ...keys.flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, text)]))];
}

function describe(view, node) {
  const { nodes } = view;
  const [rank, , lane] = nodes.tables.rows[nodes.row[node]];
  const length = nodes.ns(nodes.length[node]);
  const rows = [
    ["kind", nodes.kindName(node)], ["where", [nodes.lane(rank), lane].filter(Boolean).join(", ")],
    ["start", duration(nodes.ns(nodes.start[node]))], ["lasts", duration(length)],
  ];
  if (nodes.phase[node]) rows.push(["phase", nodes.tables.phases[nodes.phase[node] - 1]]);
  if (nodes.module[node]) rows.push(["module", nodes.tables.modules[nodes.module[node] - 1]]);
  const work = nodes.work(node);
  if (work !== null && length > 0) {
    if (work.operations > 0) rows.push(["operations", `${rate(work.operations, "FLOP")}, ${rate(work.operations / length * 1e9, "FLOP/s")}`]);
    if (work.bytes > 0) rows.push(["bytes", `${bytes(work.bytes)}, ${rate(work.bytes / length * 1e9, "B/s")}`]);
  }
  const communication = nodes.communication(node);
  if (communication !== null) {
    rows.push(["operation", `${communication.type}, ${bytes(communication.bytes)}, group ${communication.group}`]);
    rows.push(["waits", `${duration(communication.wait)} for other ranks, then ${duration(Math.max(0, length - communication.wait))} of transfer`]);
  }
  const onPath = nodes.pathAt.get(node);
  if (onPath !== undefined) {
    const { path_from, path_to } = nodes.columns;
    rows.push(["critical path", `${duration(nodes.ns(path_to[onPath] - path_from[onPath]))} of it`]);
  }
  const parent = nodes.parent(node);
  const stack = nodes.stack(node).reverse();
  const before = nodes.dependencies(node), after = nodes.dependents(node);
  return [
    el("h3", {}, el("i", { style: `background: ${view.colourOf(node)}` }), nodes.title(node)),
    el("dl", {}, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
    ...(parent < 0 ? [] : list("Inside", [link(view, parent, "")])),
    ...(stack.length === 0 ? [] : list(`Called by (${stack.length})`, stack.map(slice => link(view, slice, nodes.kindName(slice))))),
    ...(!nodes.hasEdges || nodes.isSlice(node) ? [] : list(`Waits for (${before.length})`, before.slice(0, MOST_LINKS).map(edge => link(view, edge.node, edgeText(edge))), "before")),
    ...(!nodes.hasEdges || nodes.isSlice(node) ? [] : list(`Leads to (${after.length})`, after.slice(0, MOST_LINKS).map(edge => link(view, edge.node, edgeText(edge))), "after")),
    ...(communication === null || communication.peers.length === 0 ? []
      : list(`On the other ranks (${communication.peers.length})`, communication.peers.slice(0, MOST_LINKS).map(peer =>
        link(view, peer, `rank ${nodes.rank(peer)}: arrives ${relative(nodes.ns(nodes.start[peer] - nodes.start[node]))}`)), "peers")),
  ];
}

function edgeText({ kind, gap }) { return `${kind}${gap > 0 ? `, ${duration(gap)} apart` : ""}`; }
function relative(ns) { return ns === 0 ? "at the same time" : `${duration(Math.abs(ns))} ${ns > 0 ? "later" : "earlier"}`; }

function list(title, links, css = "") {
  return [el("h4", {}, title), links.length > 0 ? el("ul", { class: css }, ...links) : el("p", { class: "muted" }, "nothing")];
}

function link(view, node, text) {
  const { nodes } = view;
  return el("li", {}, el("button", { class: "node", title: nodes.title(node), onclick: () => view.select(node, true) },
    el("i", { style: `background: ${view.colourOf(node)}` }), shortened(nodes.title(node), 60),
    el("small", {}, [text, duration(nodes.ns(nodes.length[node]))].filter(Boolean).join(" · "))));
}

function toolbar(view) {
  const { nodes } = view;
  const result = el("output", { class: "muted" });
  let found = [], at = -1;
  const input = el("input", {
    type: "search", id: "search", placeholder: "search by name  ( / )", "aria-label": "search by name",
    oninput: () => look(), onkeydown: event => { if (event.key === "Enter") go(event.shiftKey ? -1 : 1); },
  });
  addEventListener("keydown", event => {
    if (event.key === "/" && !/input|select|textarea/i.test(event.target.tagName)) {
      event.preventDefault();
      input.focus();
    }
  });

  function look() {
    const text = input.value.trim();
    found = text === "" ? [] : nodes.search(text);
    at = -1;
    view.lit = text === "" ? null : Uint32Array.from(found);
    const total = sum(found.filter(node => !nodes.isSlice(node)).map(node => nodes.length[node]));
    result.textContent = text === "" ? "" : found.length === 0 ? "not found" : `${plural(found.length, "node")}, ${duration(nodes.ns(total))} in all`;
    view.redraw();
  }

  function go(by) {
    if (found.length === 0) return;
    at = (at + by + found.length) % found.length;
    result.textContent = `${count(at + 1)} of ${count(found.length)}`;
    view.select(found[at], true);
  }

  const colouring = el("select", { "aria-label": "colour by", onchange: event => { view.colouring = event.target.value; view.redraw(); } },
    ...["kind", "phase", "name", "module"].filter(each => !(`${each}s` in nodes.tables) || each === "kind" || nodes.tables[`${each}s`].length > 0)
      .map(each => el("option", { value: each }, `colour by ${each}`)));
  const path = view.path === null ? null : el("button", {
    id: "path", "aria-pressed": "false", title: "Light the chain of nodes, across ranks, that the run had to wait for",
    onclick: event => {
      view.showsPath = !view.showsPath;
      event.target.setAttribute("aria-pressed", String(view.showsPath));
      const longest = view.showsPath ? view.longestOnPath() : -1;
      if (longest >= 0) view.scrollTo(longest);
      view.redraw();
    },
  }, "critical path");
  const several = new Set(nodes.tables.rows.map(([rank]) => rank)).size > 1;
  const stacks = !nodes.tables.rows.some(([, kind]) => kind === "stack") ? null : el("button", {
    id: "stacks", "aria-pressed": String(view.showsStacks), title: "Python frames, modules, operators and runtime calls of each thread: all of a typical step, and the longest ones elsewhere",
    onclick: () => view.stacks(!view.showsStacks),
  }, "call stacks");
  return el("div", { class: "toolbar" }, input,
    el("span", { class: "group" }, el("button", { onclick: () => go(-1), title: "previous match", "aria-label": "previous match" }, "‹"),
      el("button", { onclick: () => go(1), title: "next match", "aria-label": "next match" }, "›")), result,
    el("span", { class: "space" }), colouring, path, stacks, stepChoice(view),
    several ? el("button", { onclick: () => view.foldAll(view.folded.size === 0), title: "one line each, or all rows" }, nodes.tables.lanes ? "fold lanes" : "fold ranks") : null,
    el("span", { class: "group" }, el("button", { onclick: () => view.zoom(1 / 0.5), "aria-label": "zoom out", title: "zoom out" }, "−"),
      el("button", { onclick: () => view.zoom(0.5), "aria-label": "zoom in", title: "zoom in" }, "+"),
      el("button", { onclick: () => view.fit() }, "all")));
}

function stepChoice(view) {
  const spans = new Map();
  for (const steps of view.steps.values()) {
    for (const { name, start, end } of steps) {
      const known = spans.get(name) || [Infinity, -Infinity];
      spans.set(name, [Math.min(known[0], start), Math.max(known[1], end)]);
    }
  }
  if (spans.size < 2) return null;
  return el("select", { id: "step", "aria-label": "go to step", onchange: event => {
    if (event.target.value === "") return view.fit();
    const [start, end] = spans.get(event.target.value).map(time => time / view.nodes.unit);
    return view.show(start - 0.02 * (end - start), end + 0.02 * (end - start));
  } }, el("option", { value: "" }, "all steps"), ...[...spans.keys()].map(name => el("option", { value: name }, stepTitle(name))));
}
