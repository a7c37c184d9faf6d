// A page of charts and tables of text, from what page.figures_page writes.

async function main() {
  const { content } = await readData();
  const drawn = svg => document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
  document.getElementById("page").replaceChildren(
    el("header", {}, el("h1", {}, content.title), el("nav", {}, themeButton(() => {}))),
    ...content.wrong.map(text => el("p", { class: "wrong" }, text)),
    el("section", { class: "figures" }, ...content.charts.map(drawn)),
    ...content.tables.map(textTable),
    el("footer", { class: "muted" }, `Made by ${content.made_by}.`));
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}
