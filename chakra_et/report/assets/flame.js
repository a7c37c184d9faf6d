// A flame view: the calls of a mean step, folded by name, from what chakra_et/report/call_tree.py writes.

const CALL = ["above", "name", "count", "host", "device"];
const NARROWEST = 0.002; // of the width

function flame(content) {
  const calls = named(CALL, content.calls), inside = calls.map(() => []), roots = [];
  calls.forEach((call, at) => (call.above < 0 ? roots : inside[call.above]).push(at));
  const steps = Math.max(1, content.steps.length); // of all ranks
  const body = el("div", { class: "flame" });
  let of = calls.some(call => call.device > 0) ? "device" : "host", root = -1;
  const total = list => sum(list.map(at => calls[at][of]));
  const kind = at => inside[at].length > 0 ? "operator" : of === "device" ? "kernel" : "runtime";

  function bar(at, depth, left, width, whole) {
    const { name, count: times } = calls[at], value = calls[at][of];
    const text = `${name}: ${duration(value / steps)} per step and rank, ${percent(value / whole, 1)}${times ? `, ${count(times)} calls in all` : ""}`;
    body.append(el("button", {
      title: text, "aria-label": text, style: `left: ${100 * left}%; width: ${100 * width}%; top: ${depth * 1.5}em; background: var(${variable(kind(at))})`,
      onclick: () => { root = at === root ? calls[at].above : at; fill(); },
    }, width > 0.03 ? name : ""));
  }

  function fill() {
    body.replaceChildren();
    const shown = root < 0 ? roots : [root], whole = total(shown) || 1;
    let deepest = 0;
    const add = (list, depth, from) => {
      let left = from;
      for (const at of [...list].sort((a, b) => calls[b][of] - calls[a][of])) {
        const width = calls[at][of] / whole;
        if (width < NARROWEST) continue;
        deepest = Math.max(deepest, depth);
        bar(at, depth, left, width, whole);
        add(inside[at], depth + 1, left);
        left += width;
      }
    };
    add(shown, 0, 0);
    body.style.height = `${(deepest + 1) * 1.5}em`;
  }

  fill();
  const choose = el("select", { "aria-label": "time of", onchange: event => { of = event.target.value; root = -1; fill(); } },
    ...["device", "host"].filter(name => calls.some(call => call[name] > 0)).map(name => el("option", { value: name }, `time of the ${name}`)));
  return el("div", {}, el("p", { class: "muted" }, "Modules, the operators in them and what these launch, of the mean step; the width is time. A click zooms in, another one out."), choose, body);
}
