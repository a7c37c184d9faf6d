// Text for figures, and elements whose content is always text: no name from a trace becomes markup.

function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

function digits(value) {
  const size = Math.abs(value);
  return value.toLocaleString("en-US", size >= 99.95 || size === 0
    ? { maximumFractionDigits: 0 }
    : { minimumFractionDigits: size < 9.995 ? 2 : 1, maximumFractionDigits: size < 9.995 ? 2 : 1 });
}

function scaled(value, steps, unit) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [name, factor] of steps) {
    if (size >= factor * 0.9995) return `${digits(value / factor)} ${name}${unit}`;
  }
  return `${digits(value)} ${unit}`;
}

const TIME_STEPS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]];
const SI_STEPS = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];

function duration(ns) { return ns === 0 ? "0" : scaled(ns, TIME_STEPS, ns !== null && Math.abs(ns) < 999.5 ? "ns" : ""); }
function bytes(n) { return n !== null && n >= 0 && n < 999.5 ? `${count(Math.round(n))} B` : scaled(n, SI_STEPS, "B"); }
function rate(n, unit) { return scaled(n, SI_STEPS, unit); }
function count(n) { return n === null || n === undefined ? "–" : n.toLocaleString("en-US"); }
function percent(share, places = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(places)}%`;
}
function signed(value) {
  if (value === null) return "–";
  const text = value.toFixed(2);
  return Number(text) === 0 ? "0.00%" : `${value > 0 ? "+" : ""}${text}%`;
}
function plural(n, what) { return `${count(n)} ${what}${n === 1 ? "" : "s"}`; }
function sum(values) { return values.reduce((total, value) => total + value, 0); }

// A colour of the page's style, such as "--kernel".
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function variable(name) { return `--${name.replaceAll(" ", "-")}`; }
