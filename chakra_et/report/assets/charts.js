// Bars and heat maps made of elements, so that they print and can be read without a mouse.

function legend(entries) {
  return el("ul", { class: "legend" }, ...entries.map(([name, css, help]) =>
    el("li", { title: help }, el("i", { style: `background: ${css}` }), name)));
}

// Greys, on which white letters can't be read.
const PALE = ["idle", "host", "host overhead", "device overhead", "annotation"];

// rows: [{label, parts: [ns], marks: [[ns, title]], note, hints: {name: text}}], names of the parts.
function stackedBars(rows, names, { onrow = null } = {}) {
  const most = Math.max(1, ...rows.map(row => Math.max(sum(row.parts), ...(row.marks || []).map(([at]) => at))));
  return el("div", { class: "bars" }, ...rows.map(row => {
    const total = sum(row.parts);
    const bar = el("div", { class: "bar" }, ...row.parts.map((part, at) => part <= 0 ? null : el("span", {
      style: `width: ${100 * part / most}%; background: var(${variable(names[at])})${PALE.includes(names[at]) ? "; color: var(--ink)" : ""}`,
      title: `${names[at]}: ${duration(part)}, ${percent(part / total)}${row.hints?.[names[at]] || ""}`,
    }, part / most > 0.06 ? percent(part / total) : "")), ...(row.marks || []).map(([at, title]) =>
      el("b", { style: `left: ${100 * at / most}%`, title })));
    return el("div", { class: onrow ? "row link" : "row", onclick: onrow ? () => onrow(row) : null },
      el("span", { class: "label" }, row.label), bar, el("span", { class: "total" }, row.note || duration(total)));
  }));
}

// values[row][column], null for none; colours from transparent (`base` and below) to the CSS variable (the largest).
function heatMap(rowNames, columnNames, values, text, { css = "--heat", corner = "", numbers = false, base = 0, none = "took no part" } = {}) {
  const most = Math.max(0, ...values.flat().filter(value => value !== null));
  const head = numbers ? [el("thead", {}, el("tr", {}, el("th", {}, corner), ...columnNames.map(name => el("th", { class: "figure" }, name))))] : [];
  const rows = values.map((row, at) => el("tr", {}, el("th", { scope: "row" }, rowNames[at]), ...row.map((value, column) => {
    const share = value === null || most <= base ? 0 : Math.max(0, (value - base) / (most - base));
    const strength = Math.sqrt(share);
    return el("td", {
      class: numbers ? "figure" : "",
      style: `background: color-mix(in srgb, var(${css}) ${(100 * strength).toFixed(0)}%, transparent)${strength > 0.6 ? "; color: var(--paper)" : ""}`,
      title: `${rowNames[at]}, ${columnNames[column]}: ${value === null ? none : text(value)}`,
    }, numbers && value ? text(value) : "");
  })));
  return el("div", { class: "scroll" }, el("table", { class: numbers ? "heat numbers" : "heat" }, ...head, el("tbody", {}, ...rows)));
}

function tabbed(views) {
  const body = el("div");
  const buttons = views.map(([name, make], at) => el("button", { role: "tab", onclick: () => choose(at) }, name));
  function choose(chosen) {
    buttons.forEach((button, at) => button.setAttribute("aria-selected", String(at === chosen)));
    body.replaceChildren(views[chosen][1]());
  }
  if (views.length > 0) choose(0);
  return el("div", {}, el("div", { class: "tabs", role: "tablist" }, ...buttons), body);
}

function themeButton(changed) {
  const themes = ["light", "dark"];
  return el("button", { id: "theme", class: "quiet", title: "light or dark", onclick: () => {
    const dark = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = themes[1 - themes.indexOf(dark)];
    changed();
  } }, "◐");
}
