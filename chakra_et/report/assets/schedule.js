// A page of schedules: lanes of bars, and tables of text, from what chakra_et/report/schedule.py writes.

async function main() {
  const page = document.getElementById("page");
  const { content, columns } = await readData();
  const view = new Timeline(content, new Nodes(content.timeline, columns));
  view.frame.append(detailsPanel(view));
  const { kinds, colours } = content.timeline;
  page.replaceChildren(
    el("header", {}, el("div", {}, el("h1", {}, content.title), el("p", { class: "muted" }, content.note)), el("nav", {}, themeButton(() => view.recolour()))),
    el("section", { id: "timeline" }, toolbar(view), view.frame, legend(kinds.map((kind, at) => [kind, colours[at]]))),
    ...content.tables.map(textTable),
    el("footer", { class: "muted" }, `Made by ${content.made_by}.`));
  listen(view);
  view.layOut();
  view.draw();
  // For tests and for those who want to script the page.
  globalThis.chakraReport = { content, view };
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}
