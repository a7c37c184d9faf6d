// What the mouse and the keyboard do with the timeline.

function listen(view) {
  const { canvas } = view;
  let drag = null;
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener("wheel", event => {
    const [x] = place(event);
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), view.time(Math.max(x, GUTTER)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view.pan((event.deltaX || event.deltaY) * view.pixel);
    }
  }, { passive: false });

  canvas.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    const [x, y] = place(event);
    const part = y < OVERVIEW ? "overview" : y < TOP ? "ruler" : "rows";
    drag = { x, y, part, from: view.from, to: view.to, top: view.scroller.scrollTop, moved: false };
    if (part === "overview") centreOn(x);
    canvas.setPointerCapture(event.pointerId);
  });

  canvas.addEventListener("pointermove", event => {
    const [x, y] = place(event);
    if (drag === null) return hover(x, y);
    drag.moved ||= Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4;
    if (!drag.moved) return undefined;
    if (drag.part === "overview") centreOn(x);
    else if (drag.part === "ruler") {
      view.chosen = [view.time(Math.max(drag.x, GUTTER)), view.time(Math.max(x, GUTTER))];
      view.redraw();
    } else {
      const units = (drag.x - x) * view.pixel;
      view.show(drag.from + units, drag.to + units);
      view.scroller.scrollTop = drag.top + drag.y - y;
    }
    return undefined;
  });

  canvas.addEventListener("pointerup", event => {
    if (drag === null) return;
    const { moved, part } = drag;
    const [x, y] = place(event);
    drag = null;
    if (part === "ruler" && view.chosen) {
      const [a, b] = view.chosen;
      view.chosen = null;
      view.show(Math.min(a, b), Math.max(a, b));
    } else if (part === "rows" && !moved) click(x, y);
  });

  canvas.addEventListener("pointerleave", () => hover(-1, -1));
  canvas.addEventListener("dblclick", event => {
    const node = view.nodeAt(...place(event));
    if (node >= 0) view.show(view.nodes.start[node] - view.nodes.length[node] * 0.2, view.nodes.end(node) + view.nodes.length[node] * 0.2);
  });
  canvas.addEventListener("keydown", key);

  function centreOn(x) {
    const middle = overviewTime(view, x), half = (view.to - view.from) / 2;
    view.show(middle - half, middle + half);
  }

  function click(x, y) {
    const line = view.lineAt(y);
    if (line !== null && line.row < 0 && line.curve === null && x < GUTTER) view.fold(line.rank);
    else view.select(view.nodeAt(x, y));
  }

  function hover(x, y) {
    const node = x < 0 ? -1 : view.nodeAt(x, y);
    canvas.style.cursor = node >= 0 ? "pointer" : y >= OVERVIEW && y < TOP ? "col-resize" : "default";
    if (node !== view.hovered) {
      view.hovered = node;
      view.redraw();
    }
    const line = x < GUTTER ? null : view.lineAt(y), curve = line !== null && line.curve !== null;
    view.tip.hidden = node < 0 && !curve;
    if (view.tip.hidden) return;
    view.tip.replaceChildren(...(curve ? memoryTip(view, line, x) : tipLines(view, node)));
    const right = x > view.width / 2;
    view.tip.style.left = right ? "auto" : `${x + 14}px`;
    view.tip.style.right = right ? `${view.width - x + 14}px` : "auto";
    view.tip.style.top = `${y + 16}px`;
  }

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = (view.to - view.from) * 0.2;
    const actions = {
      ArrowLeft: () => view.pan(-step), ArrowRight: () => view.pan(step), a: () => view.pan(-step), d: () => view.pan(step),
      w: () => view.zoom(0.6), s: () => view.zoom(1 / 0.6), "+": () => view.zoom(0.6), "-": () => view.zoom(1 / 0.6),
      0: () => view.fit(), Escape: () => view.select(-1),
      ",": () => neighbour(-1), ".": () => neighbour(1),
      "[": () => follow(view.nodes.dependencies), "]": () => follow(view.nodes.dependents),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  function neighbour(by) {
    const { nodes, selected } = view, next = selected + by;
    if (selected >= 0 && next >= 0 && next < nodes.count && nodes.row[next] === nodes.row[selected]) view.select(next, true);
  }

  function follow(edges) {
    const found = view.selected < 0 ? [] : edges.call(view.nodes, view.selected);
    if (found.length > 0) view.select(found[0].node, true);
  }
}

function tipLines(view, node) {
  const { nodes } = view;
  const communication = nodes.communication(node);
  const lines = [
    el("strong", {}, shortened(nodes.title(node), 90)),
    el("span", {}, `${nodes.kindName(node)} · ${duration(nodes.ns(nodes.length[node]))} · at ${duration(nodes.ns(nodes.start[node]))}`),
  ];
  if (communication !== null) {
    const wait = communication.wait > 0 ? `, waits ${duration(communication.wait)} for other ranks` : "";
    lines.push(el("span", {}, `${communication.type}, ${bytes(communication.bytes)}${wait}`));
  }
  if (nodes.tables.lanes) lines.push(el("span", {}, view.place(node)));
  if (nodes.module[node]) lines.push(el("span", {}, shortened(nodes.tables.modules[nodes.module[node] - 1], 90)));
  return lines;
}

function shortened(text, length) { return text.length <= length ? text : `${text.slice(0, length - 1)}…`; }
