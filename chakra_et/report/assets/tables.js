// Tables that sort by a click on a column, filter by text and show more rows on demand.

const FIRST_ROWS = 25;

// columns: [{name, value: row → number or text, text: row → shown text (default: the value), help, share: row → 0…1
// for a bar behind the figure, node: row → element}]. Figures are sorted from high to low at first, text from a to z.
function sortableTable(columns, rows, { sorted = null, filter = null, limit = FIRST_ROWS, label = "", onrow = null } = {}) {
  let order = sorted === null ? null : { column: sorted, down: true };
  let wanted = "", shown = limit;
  const body = el("tbody");
  const more = el("button", { class: "quiet", onclick: () => { shown *= 8; fill(); } });
  const heads = columns.map((column, at) => el("th", {
    scope: "col", tabindex: 0, class: isFigure(column) ? "figure" : "", title: column.help,
    onclick: () => sortBy(at), onkeydown: event => { if (event.key === "Enter") sortBy(at); },
  }, column.name));
  const search = filter === null ? null : el("input", {
    type: "search", placeholder: filter, "aria-label": filter,
    oninput: event => { wanted = event.target.value.toLowerCase(); shown = limit; fill(); },
  });

  function isFigure(column) {
    return rows.length > 0 && rows.every(row => typeof column.value(row) !== "string");
  }

  function sortBy(at) {
    order = { column: at, down: order !== null && order.column === at ? !order.down : isFigure(columns[at]) };
    fill();
  }

  function compare(left, right) {
    const value = columns[order.column].value;
    const [a, b] = [value(left), value(right)];
    // What is not known comes last in both directions.
    if (a === null || b === null) return (a === null) - (b === null);
    const difference = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
    return order.down ? -difference : difference;
  }

  function fill() {
    heads.forEach((head, at) => {
      if (order !== null && order.column === at) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    let chosen = wanted === "" ? [...rows] : rows.filter(row => columns.some(column => shownText(column, row).toLowerCase().includes(wanted)));
    if (order !== null) chosen.sort(compare);
    body.replaceChildren(...chosen.slice(0, shown).map(tableRow));
    more.hidden = chosen.length <= shown;
    more.textContent = `show more of ${count(chosen.length)}`;
  }

  function tableRow(row) {
    const element = el("tr", {}, ...columns.map((column, at) => cell(column, row, heads[at].className)));
    if (onrow !== null) {
      element.classList.add("link");
      element.addEventListener("click", () => onrow(row));
    }
    return element;
  }

  fill();
  const table = el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, ...heads)), body);
  return el("div", { class: "table" }, search, el("div", { class: "scroll" }, table), more);
}

function shownText(column, row) {
  const value = column.value(row);
  return column.text ? column.text(row) : value === null ? "–" : typeof value === "number" ? count(value) : value;
}

function cell(column, row, kind) {
  const text = shownText(column, row);
  const element = el("td", { class: kind, title: text.length > 60 ? text : null });
  element.append(column.node ? column.node(row) : text);
  if (column.share) {
    const share = Math.max(0, Math.min(1, column.share(row) || 0));
    element.style.background = `linear-gradient(to left, var(--bar) ${(100 * share).toFixed(1)}%, transparent 0)`;
  }
  return element;
}

// Rows with a "path" such as A/B/C as a tree that opens by a click; a row shows the sums of what is inside.
// figures: [{name, of: row → number, text: number → text, help}]
function treeTable(rows, figures, { label = "" } = {}) {
  const root = { name: "", children: new Map(), totals: figures.map(() => 0) };
  for (const row of rows) {
    let node = root;
    const values = figures.map(figure => figure.of(row));
    values.forEach((value, at) => { root.totals[at] += value; });
    for (const part of row.path.split("/")) {
      if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), totals: figures.map(() => 0) });
      node = node.children.get(part);
      values.forEach((value, at) => { node.totals[at] += value; });
    }
  }
  let by = 0, down = true;
  const open = new Set();
  let only = root;
  while (only.children.size === 1) { [only] = only.children.values(); open.add(only); }
  const body = el("tbody");
  const heads = figures.map((figure, at) => el("th", { scope: "col", class: "figure", tabindex: 0, title: figure.help, onclick: () => {
    down = by === at ? !down : true;
    by = at;
    fill();
  } }, figure.name));

  function fill() {
    heads.forEach((head, at) => at === by ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    body.replaceChildren();
    add(root, 0);
  }

  function add(node, depth) {
    const children = [...node.children.values()].sort((a, b) => (b.totals[by] - a.totals[by]) * (down ? 1 : -1));
    for (const child of children) {
      const inner = child.children.size > 0;
      const mark = inner ? (open.has(child) ? "▾ " : "▸ ") : "  ";
      const name = el("td", { style: `padding-left: ${0.6 + 1.1 * depth}em` }, el("span", { class: "mark" }, mark), child.name);
      const row = el("tr", inner ? { class: "link", "aria-expanded": String(open.has(child)) } : {}, name, ...figures.map((figure, at) =>
        cell({ value: () => child.totals[at], text: () => figure.text(child.totals[at]), share: () => child.totals[at] / (root.totals[at] || 1) }, child, "figure")));
      if (inner) row.addEventListener("click", () => { if (!open.delete(child)) open.add(child); fill(); });
      body.append(row);
      if (inner && open.has(child)) add(child, depth + 1);
    }
  }

  fill();
  const table = el("table", { class: "tree", "aria-label": label }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "module"), ...heads)), body);
  return el("div", { class: "table" }, el("div", { class: "scroll" }, table));
}

// A section with a table whose cells are text; columns of numbers sort as numbers.
function textTable({ title, header, rows }) {
  const columns = header.map((name, at) => ({
    name, text: row => row[at], value: row => row[at] !== "" && Number.isFinite(Number(row[at])) ? Number(row[at]) : row[at],
  }));
  return el("section", {}, el("h2", {}, title), sortableTable(columns, rows, { label: title }));
}
