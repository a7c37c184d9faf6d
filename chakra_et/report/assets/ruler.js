// The fixed top of the timeline: a strip with the whole run, and the ruler below it.

function drawRuler(view, pen) {
  const { unit } = view.nodes;
  pen.fillStyle = view.style.panel;
  pen.fillRect(0, OVERVIEW, view.width, RULER);
  pen.fillStyle = view.style.muted;
  pen.fillText("drag to zoom in", 4, OVERVIEW + RULER / 2);
  const step = tick((view.to - view.from) * unit / ((view.width - GUTTER) / 95)) / unit;
  clip(pen, GUTTER, OVERVIEW, view.width - GUTTER, view.visible, () => {
    for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
      const x = view.x(time);
      pen.fillStyle = view.style.muted;
      pen.fillText(duration(Math.round(time * unit)), x + 4, OVERVIEW + RULER / 2);
      pen.fillStyle = view.style.line;
      pen.fillRect(x, OVERVIEW + 3, 1, RULER - 3);
    }
    if (view.chosen) {
      pen.fillStyle = view.style.accent;
      pen.globalAlpha = 0.25;
      const [a, b] = view.chosen.map(time => view.x(time));
      pen.fillRect(Math.min(a, b), OVERVIEW, Math.abs(b - a), view.visible);
      pen.globalAlpha = 1;
    }
  });
}

// A round number of ns that is not below the wanted one: 1, 2 or 5 times a power of ten.
function tick(wanted) {
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1)));
  return [1, 2, 5, 10].map(factor => factor * power).find(size => size >= wanted);
}

function overviewX(view, time) { return GUTTER + time / view.nodes.last * (view.width - GUTTER); }
function overviewTime(view, x) { return (x - GUTTER) / (view.width - GUTTER) * view.nodes.last; }

// All rows squeezed into a strip, drawn once for each width and colouring, with the shown stretch left bright.
function drawOverview(view, pen) {
  const key = [view.width, view.colouring, view.style.paper, view.style.ink].join();
  if (!view.overview || view.overview.key !== key) view.overview = { key, image: overviewImage(view) };
  pen.fillStyle = view.style.paper;
  pen.fillRect(0, 0, view.width, OVERVIEW);
  pen.drawImage(view.overview.image, GUTTER, 0, view.width - GUTTER, OVERVIEW);
  pen.fillStyle = view.style.muted;
  pen.fillText("whole run", 4, OVERVIEW / 2);
  const left = overviewX(view, Math.max(0, view.from)), right = overviewX(view, Math.min(view.nodes.last, view.to));
  pen.globalAlpha = 0.72;
  pen.fillStyle = view.style.paper;
  pen.fillRect(GUTTER, 0, left - GUTTER, OVERVIEW);
  pen.fillRect(right, 0, view.width - right, OVERVIEW);
  pen.globalAlpha = 1;
  pen.strokeStyle = view.style.ink;
  pen.lineWidth = 1;
  pen.strokeRect(left + 0.5, 0.5, Math.max(right - left - 1, 2), OVERVIEW - 1);
}

function overviewImage(view) {
  const width = view.width - GUTTER, { rows } = view.nodes.tables, flat = rows.filter(([, kind]) => kind !== "stack").length;
  const image = new OffscreenCanvas(width, OVERVIEW), pen = image.getContext("2d");
  const pixel = view.nodes.last / width, level = view.levels.forPixel(pixel);
  const height = (OVERVIEW - 2) / flat;
  for (let row = 0, place = 0; row < rows.length; row++) {
    if (rows[row][1] === "stack") continue;
    for (let at = level.first[row]; at < level.first[row + 1]; at++) {
      pen.fillStyle = view.colourOf(level.node[at]);
      const extent = level.end[at] - level.start[at];
      pen.globalAlpha = extent > 0 ? 0.3 + 0.7 * Math.min(1, level.busy[at] / extent) : 0.3;
      pen.fillRect(level.start[at] / pixel, 1 + place * height, Math.max(extent / pixel, 0.7), Math.max(height, 0.8));
    }
    place++;
  }
  return image;
}
