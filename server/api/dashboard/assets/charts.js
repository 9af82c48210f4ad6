"use strict";
// The charts. Each function draws data into an element with Plotly.react, which updates only what changed.
const dark = matchMedia("(prefers-color-scheme: dark)");
const WINDOW = 10; // points over which the resource's use is averaged
const RESOURCES = { // names on the page, unit of a request and a batch, what the batches of a point took
  energy: { rate: "Power", each: "Energy per request", batch: "Energy of a batch ζ(b)", unit: "mJ", spent: (p) => p.joules },
  cpu_time: { rate: "CPU", each: "CPU time per request", batch: "CPU time of a batch ζ(b)", unit: "ms", spent: (p) => p.cpu_s },
  busy_time: { rate: "Busy device", each: "Busy time per request", batch: "Busy time of a batch ζ(b)", unit: "ms",
               spent: (p) => p.sizes.reduce((sum, [, count, mean]) => sum + count * mean / 1e3, 0) },
};

function colors() {
  return dark.matches
    ? { ink: "#e6ebf0", grid: "#2b343d", card: "#1a2027", soft: "#8b98a5", now: "#ff8a4c", wait: "#2c343c",
        low: "#2a6ba6", high: "#d3ebff", lines: ["#56b4e9", "#f2c14e", "#ff8a4c", "#2fc99a"] }
    : { ink: "#1c2733", grid: "#e6eaee", card: "#ffffff", soft: "#7d8894", now: "#d55e00", wait: "#ecebe8",
        low: "#a4cbea", high: "#08306b", lines: ["#0072b2", "#b87900", "#c24e00", "#00805c"] };
}

const options = { responsive: true, displayModeBar: false }; // plotly's buttons include an upload to its cloud

function layout(x, y, more = {}) {
  const { ink, grid, card } = colors();
  const axis = { color: ink, gridcolor: grid, linecolor: grid, zeroline: false, automargin: true, fixedrange: true };
  return { margin: { l: 4, r: 8, t: 6, b: 4 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
           font: { color: ink, family: "system-ui, sans-serif", size: 12 }, dragmode: false, hovermode: "x unified",
           hoverlabel: { bgcolor: card, font: { color: ink } }, showlegend: true,
           legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...more,
           xaxis: { ...axis, title: { text: x, standoff: 6 }, ...more.xaxis },
           yaxis: { ...axis, title: { text: y, standoff: 6 }, rangemode: "tozero", ...more.yaxis } };
}

function draw(element, label, traces, plan) {
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", label);
  if (!element.classList.contains("js-plotly-plot")) element.replaceChildren();
  Plotly.react(element, traces, plan, options);
}

function line(name, index, x, y, more = {}) {
  const color = colors().lines[index];
  return { type: "scatter", mode: "lines", name, x, y, line: { color, width: 2, dash: ["solid", "dash", "dot"][index] },
           hovertemplate: "%{y:.4~g}", ...more };
}

function timeLayout(span, y, more = {}) {
  return layout("seconds ago", y, { ...more, xaxis: { range: [-span, 0], nticks: 7 } });
}

function drawRate(element, points, ago, span) {
  const per = (key) => points.map((p) => p[key] / p.span);
  draw(element, "Arrivals and responses per second over time", [
    line("arrivals", 0, ago, per("arrivals")), line("responses", 1, ago, per("answered")),
    line("measured arrival rate", 2, ago, points.map((p) => p.rate)),
  ], timeLayout(span, "per second"));
}

function drawQueue(element, points, ago, span) {
  draw(element, "Queue length over time", [line("queued", 0, ago, points.map((p) => p.queue), { fill: "tozeroy" })],
       timeLayout(span, "queued requests", { showlegend: false }));
}

function drawResponse(element, points, ago, span, slo) {
  const { ink, card } = colors(), lines = ["p50", "p95", "p99"];
  const plan = timeLayout(span, "ms");
  if (slo !== null) {
    plan.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: slo, y1: slo, line: { color: ink, width: 1.5, dash: "dot" } }];
    plan.annotations = [{ text: `objective ${slo} ms`, showarrow: false, xref: "paper", x: 0, xanchor: "left", y: slo,
                          yanchor: "bottom", font: { color: ink, size: 11 }, bgcolor: card }];
  }
  draw(element, "Response time percentiles over time", lines.map((name, i) => line(name, i, ago, points.map((p) => p[name]))), plan);
}

// averages over the last WINDOW points: the resource per second, and per request in thousandths
function spending(points, { spent }) {
  const rate = [], each = [];
  points.forEach((_, i) => {
    const last = points.slice(Math.max(0, i + 1 - WINDOW), i + 1), known = last.filter((p) => spent(p) !== null);
    const total = known.reduce((sum, p) => sum + spent(p), 0), served = last.reduce((sum, p) => sum + p.answered, 0);
    rate.push(total / last.reduce((sum, p) => sum + p.span, 0));
    each.push(served && known.length ? 1e3 * total / served : null);
  });
  return { rate, each };
}

function drawSpending([rate, each], names, rateUnit, found, ago, span) {
  draw(rate, `${names.rate} over time`, [line(names.rate, 0, ago, found.rate, { fill: "tozeroy" })],
       timeLayout(span, `${rateUnit}, last ten seconds`, { showlegend: false }));
  draw(each, `${names.each} over time`, [line(names.each, 0, ago, found.each)],
       timeLayout(span, `${names.unit}, last ten seconds`, { showlegend: false }));
}

// share of each batch size in each interval, and the mean batch size
function drawSizes(element, points, ago, span, largest) {
  const { low, high, now } = colors(), columns = Math.min(120, span), width = span / columns;
  const step = Math.ceil(largest / 64), rows = Math.ceil(largest / step);
  const cells = Array.from({ length: rows }, () => Array(columns).fill(null)), batches = Array(columns).fill(0), served = Array(columns).fill(0);
  points.forEach((point, i) => {
    const column = Math.min(columns - 1, Math.max(0, Math.floor((ago[i] + span) / width)));
    for (const [size, count] of point.sizes) {
      const row = Math.ceil(size / step) - 1;
      cells[row][column] = (cells[row][column] ?? 0) + count;
      batches[column] += count;
      served[column] += size * count;
    }
  });
  const x = batches.map((_, i) => (i + 0.5) * width - span);
  draw(element, "Batch sizes over time", [
    { type: "heatmap", name: "batches", x, y: cells.map((_, i) => (i + 1) * step), z: cells.map((row) => row.map((n, i) => n && n / batches[i])),
      colorscale: [[0, low], [1, high]], zmin: 0, zmax: 1, showscale: false, xgap: 0.01, ygap: 0.5, hoverongaps: false,
      hovertemplate: "size %{y}: %{z:.0%} of the batches<extra></extra>" },
    { type: "scatter", mode: "lines", name: "mean", x, y: batches.map((n, i) => n ? served[i] / n : null),
      line: { color: now, width: 2 }, hovertemplate: "mean %{y:.3g}<extra></extra>" },
  ], timeLayout(span, "batch size", { hovermode: "closest", showlegend: false }));
}

function drawPolicy(element, view, trail) {
  const c = colors(), one = view.rates_hz.length === 0, top = view.profile.max_batch_size;
  const last = view.queue_lengths.at(-1), highest = one ? 1 : Math.max(...view.rates_hz), y = one ? [0.5] : view.rates_hz;
  const at = trail.map((s) => [Math.min(s.n, last), one ? 0.5 : Math.min(s.rate, highest * 1.02)]);
  const gaps = { xgap: one ? 1 : 0.3, ygap: one ? 1 : 0.3 };
  element.classList.toggle("one", one);
  const plan = layout("queue length", "arrivals per second", { hovermode: "closest", showlegend: false, height: element.clientHeight,
    xaxis: { range: [-0.5, last + 0.5], showgrid: false },
    yaxis: one ? { visible: false, range: [0, 1] } : { range: [0, highest * 1.03], showgrid: false } });
  const cell = one ? "%{x} queued: %{text}<extra></extra>" : "%{x} queued, %{y:.4~g} /s: %{text}<extra></extra>";
  const ages = at.map((_, i) => (i + 1) / at.length), newest = at.length - 1;
  draw(element, `Action of policy ${view.spec} by queue length and arrival rate`, [
    { type: "heatmap", x: view.queue_lengths, y, z: view.batch_size, showscale: false, zmin: 0, zmax: top, ...gaps,
      text: view.batch_size.map((row) => row.map((b) => b ? `launches ${b}` : "waits")), hovertemplate: cell,
      colorscale: [[0, c.wait], [0.5 / top, c.wait], [0.5 / top, c.low], [1, c.high]] },
    { type: "scatter", mode: "markers", x: at.map((p) => p[0]), y: at.map((p) => p[1]), hoverinfo: "skip", cliponaxis: false,
      marker: { color: c.now, opacity: ages.map((a) => a ** 2),
        size: at.map((_, i) => i === newest ? 17 : 7), line: { color: c.card, width: at.map((_, i) => i === newest ? 3 : 0) } } },
  ], plan);
}

// a table of maximum ages: for each queue length the ages of the oldest request at which it waits, and launches
function drawAges(element, view, row, trail, batches) {
  const c = colors(), ages = row.max_age_ms, top = row.max_batch_size ?? view.profile.max_batch_size, last = ages.length;
  const reached = batches.map((b) => b.waited_ms), slo = view.objective_ms ?? 0;
  const highest = 1.1 * Math.max(slo, ...ages.filter((age) => age <= 2 * slo || !slo)) || 1, x = Array.from({ length: last }, (_, i) => i + 1);
  const from = x.map((n) => Math.min(ages[Math.min(n, last - 1)], highest));
  const at = trail.filter((s) => s.n).map((s) => [Math.min(s.n, last), Math.min(s.age, highest)]), newest = at.length - 1;
  element.classList.remove("one");
  const plan = layout("queue length", "age of the oldest request, ms", { hovermode: "closest", showlegend: false, barmode: "stack",
    bargap: 0.04, height: element.clientHeight, xaxis: { range: [0.4, last + 0.6], showgrid: false }, yaxis: { range: [0, highest], showgrid: false } });
  const bars = (y, color, verb) => ({ type: "bar", x, y, marker: { color, line: { width: 0 }, colorscale: [[0, c.low], [1, c.high]], cmin: 1, cmax: top },
    customdata: x.map((n, i) => [verb, ages[Math.min(n, last - 1)], Math.min(n, top)]),
    hovertemplate: "%{x} queued: launches %{customdata[2]} once the oldest is %{customdata[1]:.4~g} ms old<extra></extra>" });
  const traces = [bars(from, c.wait), bars(from.map((age) => highest - age), x.map((n) => Math.min(n, top)))];
  if (row.mix) traces.push({ type: "scatter", mode: "lines", x, y: x.map((n) => Math.min(row.mix.max_age_ms[Math.min(n, last - 1)], highest)),
    line: { color: c.soft, width: 2, dash: "dot", shape: "hvh" }, hovertemplate: `second table, for ${(100 * row.mix.probability).toFixed(0)}% of the batches: %{y:.4~g} ms<extra></extra>` });
  traces.push({ type: "scatter", mode: "markers", x: batches.map((b) => b.size), y: reached.map((ms) => Math.min(ms, highest)),
    marker: { symbol: "circle-open", size: 7, color: c.now, line: { width: 1.5 } }, hovertemplate: "a batch of %{x}, oldest %{y:.4~g} ms<extra></extra>" });
  traces.push({ type: "scatter", mode: "markers", x: at.map((p) => p[0]), y: at.map((p) => p[1]), hoverinfo: "skip", cliponaxis: false,
    marker: { color: c.now, opacity: at.map((_, i) => ((i + 1) / at.length) ** 2), size: at.map((_, i) => i === newest ? 17 : 7),
      line: { color: c.card, width: at.map((_, i) => i === newest ? 3 : 0) } } });
  draw(element, `Maximum ages of policy ${view.spec} by queue length`, traces, plan);
}

function drawProfile(element, [name, unit, dots], values, seen) {
  const c = colors(), sizes = values.map((_, i) => i + 1);
  const traces = [line("profile", 0, sizes, values)];
  if (seen.length) traces.push({ type: "scatter", mode: "markers", name: dots, x: seen.map((s) => s.size), y: seen.map((s) => s.y),
    marker: { color: c.now, size: seen.map((s) => s.width), line: { color: c.card, width: 1 } }, text: seen.map((s) => s.text),
    hovertemplate: "%{text}" });
  draw(element, `${name} by batch size`, traces, layout("batch size", unit, { xaxis: { rangemode: "tozero" } }));
}
