// Memory of each rank's devices: curves under the rows of their rank, and a table of peaks.

const MEMORY_ROW = 36;

function isQueue({ device }) { return device.startsWith("launched"); }
function amount(curve, level) { return isQueue(curve) ? count(level) : bytes(level); }

// The curves of a rank: {rank, device, first, end, reserves, most}; a curve's places in the columns are from first to end.
function memoryCurves(nodes) {
  const { memory_allocated, memory_reserved } = nodes.columns;
  return nodes.tables.memory.map(([rank, device, first, end, reserves]) => {
    let most = 1;
    for (let at = first; at < end; at++) most = Math.max(most, memory_allocated[at], memory_reserved[at]);
    return { rank, device, first, end, reserves, most };
  });
}

// What a curve shows from one time to another: the highest level, -1 before its first moment.
function levelBetween(nodes, curve, values, from, to) {
  const { memory_time } = nodes.columns;
  const begin = lowerBound(memory_time, from + 1e-9, curve.first, curve.end) - 1;
  let level = begin < curve.first ? -1 : values[begin];
  for (let at = Math.max(begin, curve.first); at < curve.end && memory_time[at] < to; at++) level = Math.max(level, values[at]);
  return level;
}

function drawMemory(view, pen, { curve }, y, height) {
  const { memory_allocated, memory_reserved } = view.nodes.columns;
  const bottom = y + height - 2, scale = (height - 5) / curve.most;
  drawLabel(view, pen, curve.device, 14, y, height / 2 + 4, view.style.muted);
  drawLabel(view, pen, `≤ ${amount(curve, curve.most)}`, 14, y + height / 2 - 2, height / 2, view.style.muted);
  clip(pen, GUTTER, TOP, view.width - GUTTER, view.visible - TOP, () => {
    pen.fillStyle = view.style.line;
    pen.fillRect(GUTTER, bottom, view.width - GUTTER, 1);
    pen.fillStyle = isQueue(curve) ? view.style.muted : view.style.memory;
    eachPixel(view, curve, memory_allocated, (x, level) => pen.fillRect(x, bottom - level * scale, 1, level * scale));
    if (!curve.reserves) return;
    pen.fillStyle = view.style.ink;
    eachPixel(view, curve, memory_reserved, (x, level) => pen.fillRect(x, bottom - level * scale, 1, 1));
  });
}

// One column of a curve for every pixel, as no more can be seen.
function eachPixel(view, curve, values, draw) {
  for (let x = GUTTER; x < view.width; x++) {
    const level = levelBetween(view.nodes, curve, values, view.time(x), view.time(x + 1));
    if (level > 0) draw(x, level);
  }
}

function memoryTip(view, { curve }, x) {
  const { memory_allocated, memory_reserved } = view.nodes.columns;
  const [from, to] = [view.time(x), view.time(x + 1)];
  const level = levelBetween(view.nodes, curve, memory_allocated, from, to);
  const reserved = curve.reserves ? `, ${bytes(levelBetween(view.nodes, curve, memory_reserved, from, to))} reserved` : "";
  return [el("strong", {}, `rank ${curve.rank}, ${curve.device}`),
    el("span", {}, level < 0 ? "not known before the first allocation" : isQueue(curve) ? `${count(level)} of the kernels and copies` : `${bytes(level)} allocated${reserved}`),
    el("span", {}, `at ${duration(Math.round(view.nodes.ns(from)))}`)];
}

function memorySection(content, go) {
  if (content.memory.length === 0) return null;
  const columns = [
    { name: "rank", value: row => row.rank }, { name: "device", value: row => row.device },
    { name: "peak allocated", value: row => row.peak_bytes, text: row => bytes(row.peak_bytes) },
    { name: "peak reserved", help: "by the caching allocator", value: row => row.reserved_bytes, text: row => row.reserved_bytes === null ? "–" : bytes(row.reserved_bytes) },
    { name: "peak at", value: row => row.peak_ns, text: row => duration(row.peak_ns) },
    { name: "peak in", help: "the node that reached it", value: row => row.peak_name },
  ];
  const owners = [
    { name: "rank", value: row => row.rank }, { name: "owner", help: "the module and the outermost operator that allocated it", value: row => row.owner },
    { name: "bytes", value: row => row.bytes, text: row => bytes(row.bytes) },
    { name: "blocks", value: row => row.blocks, text: row => row.blocks === null ? "–" : count(row.blocks) },
  ];
  const held = content.memory_owners.length === 0 ? [] : [el("h3", {}, "What holds the memory at its peak"),
    sortableTable(owners, content.memory_owners, { label: "owners of memory", limit: 20 })];
  return section("memory", "Memory", sortableTable(columns, content.memory, { label: "memory", limit: 64, onrow: row => go(row.peak_ns) }), ...held,
    el("p", { class: "muted" }, "GPU memory counts from the start of the process, memory of the CPU from the start of the recording. A click on a row shows the peak in the timeline."));
}
