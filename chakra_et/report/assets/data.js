// The page's data: base64 of a gzip block of JSON and columns, as chakra_et/report/page.py writes it.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };

async function readData() {
  const text = document.getElementById("data").textContent;
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(raw.buffer).getUint32(0, true);
  const content = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + length)));
  const columns = {};
  let at = 4 + length;
  for (const [name, type, rows, encoding] of content.columns) {
    const size = ARRAYS[type].BYTES_PER_ELEMENT;
    columns[name] = decode(raw, at, rows, size, type);
    if (encoding === "delta") undoDelta(columns[name]);
    at += rows * size;
  }
  return { content, columns };
}

// A column's bytes are ordered by significance: all lowest bytes first.
function decode(raw, at, rows, size, type) {
  if (size === 1) return raw.subarray(at, at + rows);
  const bytes = new Uint8Array(rows * size);
  for (let place = 0; place < size; place++) {
    const from = at + place * rows;
    for (let row = 0, to = place; row < rows; row++, to += size) bytes[to] = raw[from + row];
  }
  return new ARRAYS[type](bytes.buffer);
}

function undoDelta(values) {
  for (let at = 1; at < values.length; at++) values[at] += values[at - 1];
}
