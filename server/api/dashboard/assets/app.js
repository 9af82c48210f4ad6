"use strict";
// Polls the state of the server and renders it. Sends requests only to /live*, /predict and /admin.
const find = (id) => document.getElementById(id);
const KEPT = 600, TRAIL = 16, PERIOD = 500, TIMEOUT = 5000, REDRAW = 5000; // points, states; ms
const page = { model: find("model").value, device: 0, run: "", points: [], trail: [], view: null, form: null, fetched: 0, last: null, lost: false };

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function figure(name, value, digits = 3) {
  const shown = value === null || !Number.isFinite(value) ? "–" : value >= 1000 ? value.toFixed(0) : String(+value.toPrecision(digits));
  text(document.querySelector(`[data-of=${name}]`), shown);
}

async function get(path, parameters) {
  const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`, { signal: AbortSignal.timeout(TIMEOUT) });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

function reset() {
  Object.assign(page, { points: [], trail: [], view: null, fetched: 0, last: null });
}

// polling

async function refresh() {
  const { model, device } = page, since = page.points.at(-1)?.seq ?? 0;
  const state = await get("live", { model, device, since });
  if (model !== page.model || device !== page.device) return; // the selection changed meanwhile
  if (page.run && page.run !== state.run) { // the server was restarted
    page.run = state.run;
    page.form = null;
    reset();
    return refresh();
  }
  page.run = state.run;
  page.last = state;
  const more = state.points.filter((p) => p.seq > since);
  page.points = page.points.concat(more).slice(-KEPT);
  page.device = state.device; // of several devices one that has the model
  state.here = state.devices[state.device].models[model]; // state of the selected device
  page.trail = [...page.trail, { n: state.here.queue_length, rate: tableRate(state.here), age: state.here.oldest_age_ms }].slice(-TRAIL);
  await refreshPolicy(state);
  if (page.form?.model !== model || page.form.id !== state.id) await refreshForm(model);
  show(state, more.length > 0);
}

// fetches the chart when the policy changed, and at most every REDRAW ms when the mean rate changed
async function refreshPolicy(state) {
  const { chart, version } = state.policy, stale = page.view?.chart !== chart;
  if (!stale || (page.view?.version === version && performance.now() - page.fetched < REDRAW)) return;
  page.fetched = performance.now();
  const view = await get("live/policy", { model: state.model, device: state.device });
  if (state.model === page.model && state.device === page.device) page.view = { ...view, version };
}

async function poll() {
  try {
    await refresh();
    if (page.lost) { page.lost = false; find("lost").hidden = true; }
  } catch (error) {
    showConnectionLost(error);
  }
  setTimeout(poll, document.hidden ? 4 * PERIOD : page.lost ? 2 * PERIOD : PERIOD);
}

function showConnectionLost(error) {
  if (page.lost) return;
  page.lost = true;
  text(find("lost"), `Connection to the server lost at ${new Date().toLocaleTimeString()} (${error.message}). Retrying.`);
  find("lost").hidden = false;
  showStatus("lost", "disconnected");
}

// rendering

function showStatus(kind, label) {
  const badge = find("status");
  badge.className = `badge ${kind}`;
  text(badge, label);
}

function show(state, more) {
  const status = { ready: "ready", draining: "draining: rejects new calls", unloaded: "unloaded: rejects new calls",
    unavailable: "unavailable: another server does not answer", broken: "device lost: restart the server" };
  showStatus(state.status, status[state.status]);
  showWeights(state.weights);
  showDevices(state.devices, state.model);
  showFigures(state);
  showPrediction(state.prediction);
  showLevels(state.levels);
  showBatches(state.batches);
  showPipelines(state.pipelines);
  if (document.hidden || !page.view) return;
  showPolicy(state);
  if (more) showCharts(state);
}

function showWeights(weights) {
  const warnings = { random: "Random weights: the outputs are meaningless.",
                     emulated: "Emulated device: service times of a real device, meaningless outputs." };
  text(find("origin"), `Weights: ${weights}.`);
  find("weights").hidden = !(weights in warnings);
  text(find("weights"), warnings[weights] ?? "");
}

function showDevices(devices, model) {
  const select = find("device");
  if (select.options.length !== devices.length) {
    select.replaceChildren(...devices.map((_, index) => new Option("", index, index === page.device, index === page.device)));
    select.parentElement.hidden = devices.length === 1;
  }
  select.selectedIndex = page.device;
  devices.forEach(({ device, up, serving, models }, index) => {
    select.options[index].disabled = !(model in models);
    text(select.options[index], up ? serving ? device : `${device} (out of service)` : `${device} (down)`);
  });
}

function showFigures(state) {
  const recent = page.points.slice(-WINDOW), sum = (value) => recent.reduce((total, p) => total + value(p), 0);
  const batches = sum((p) => p.sizes.reduce((n, s) => n + s[1], 0)), requests = sum((p) => p.sizes.reduce((n, s) => n + s[0] * s[1], 0));
  const profile = page.view?.profile, resource = RESOURCES[profile?.resource ?? "energy"], { rate, each } = spending(recent, resource);
  figure("arrivals", recent.length ? sum((p) => p.arrivals) / sum((p) => p.span) : null);
  figure("queue", state.queue_length);
  figure("batch", batches ? requests / batches : null);
  figure("p95", recent.at(-1)?.p95 ?? null);
  const [first] = state.levels; // the objective is that of level 1
  showObjective(first ? first.measured?.p95_ms ?? null : recent.at(-1)?.p95 ?? null, state.slo_ms, first ? " of level 1" : "");
  for (const element of document.querySelectorAll("[data-name]")) text(element, resource[element.dataset.name]);
  text(find("rate-unit"), profile?.rate_unit ?? "");
  text(find("each-unit"), resource.unit);
  figure("rate", profile ? rate.at(-1) ?? null : null);
  figure("each", each.at(-1) ?? null);
}

function showPrediction(prediction) {
  find("prediction").hidden = !prediction;
  const savings = prediction?.savings ?? "";
  find("savings").hidden = !savings;
  text(find("savings"), savings && `${savings[0].toUpperCase()}${savings.slice(1)}.`);
  if (!prediction) return;
  const short = (value) => +value.toPrecision(3);
  const described = ({ mean_ms, p95_ms, batch_size }) => `mean ${short(mean_ms)} ms, p95 ${short(p95_ms)} ms, batches of ${short(batch_size)}`;
  const others = Object.entries(prediction.neighbours).map(([model, rate]) => ` beside ${model} at ${short(rate)}/s`).join(",");
  text(find("prediction"), `Predicted at ${short(prediction.rate_hz)}/s${others}: ${described(prediction.predicted)}. ` +
    `Measured in the last minute, without decoding and HTTP: ${described(prediction.measured)}.`);
}

function showObjective(p95, slo, of) {
  const over = slo !== null && p95 > slo;
  text(find("objective"), slo === null ? "" : over ? `over the objective of ${slo} ms${of}` : `objective ${slo} ms${of}`);
  find("objective").classList.toggle("over", over);
}

const digits = (value) => value == null ? "–" : value.toFixed(value < 10 ? 2 : 1);
const clock = (seconds) => {
  const at = new Date(1e3 * seconds);
  return `${at.toLocaleTimeString([], { hour12: false })}.${String(at.getMilliseconds()).padStart(3, "0")}`;
};
const BATCH_COLUMNS = [  // title, text of a batch
  ["launched", (b) => clock(b.t)], ["size", (b) => b.batch_size], ["reason", (b) => b.reason], ["policy", (b) => b.policy],
  ["waiting time of the oldest, ms", (b) => digits(b.waited_ms)], ["service time, ms", (b) => digits(b.service_ms)],
  ["energy, mJ", (b) => digits(b.energy_mj)], ["CPU time, ms", (b) => digits(b.cpu_ms)],
];

const PIPELINE_COLUMNS = [
  ["pipeline", (s) => s.name], ["open calls", (s) => s.open_calls], ["calls the model", (s) => s.model],
  ["requests a call", (s) => digits(s.requests)], ["queue length of the model", (s) => s.queue_length],
];

const LEVEL_COLUMNS = [
  ["level", (l) => l.level], ["queue length", (l) => l.queue_length],
  ["mean, ms, predicted", (l) => digits(l.predicted?.mean_ms)], ["mean, ms, measured", (l) => digits(l.measured?.mean_ms)],
  ["p95, ms, predicted", (l) => digits(l.predicted?.p95_ms)], ["p95, ms, measured", (l) => digits(l.measured?.p95_ms)],
];

function showLevels(levels) {
  find("levels").hidden = !levels.length;
  fillTable(find("levels").querySelector("table"), LEVEL_COLUMNS, levels);
}

function showPipelines(pipelines) {
  find("pipelines").hidden = !pipelines.length;
  const steps = pipelines.flatMap(({ name, open_calls, steps }) => steps.map((step) => ({ name, open_calls, ...step })));
  fillTable(find("pipelines").querySelector("table"), PIPELINE_COLUMNS, steps);
}

function showBatches(batches) {
  fillTable(find("batches"), BATCH_COLUMNS, batches);
}

function fillTable(table, columns, entries) {
  const filled = (row, tag, texts) => {
    texts.forEach((value) => {
      const cell = row.appendChild(document.createElement(tag));
      cell.textContent = value;
      if (tag === "th") cell.scope = "col";
    });
    return row;
  };
  const [head] = table.tHead.rows;
  if (!head.cells.length) filled(head, "th", columns.map(([title]) => title));
  const rows = entries.map((each) => filled(document.createElement("tr"), "td", columns.map(([, of]) => of(each))));
  table.tBodies[0].replaceChildren(...rows);
}

function showPolicy(state) {
  const { view, trail } = page;
  text(find("spec"), view.spec);
  text(find("how"), view.how);
  find("objective-warning").hidden = !view.warnings.length;
  text(find("objective-warning"), view.warnings.map((line) => `${line[0].toUpperCase()}${line.slice(1)}.`).join(" "));
  text(find("key-high"), String(view.profile.max_batch_size));
  text(find("present"), describeAction(view, state.here));
  const row = rowOfAges(view, tableRate(state.here));
  text(find("condition"), row ? `· circles: the last batches · for ${+row.rate_hz.toPrecision(3)} arrivals per second`
    : view.mean_rate_hz === null ? "" : `· power weighted as for a long-run mean of ${+view.mean_rate_hz.toPrecision(3)} arrivals per second`);
  if (row) drawAges(find("chart-policy"), view, row, trail, state.batches);
  else drawPolicy(find("chart-policy"), view, trail);
}

// the arrival rate of the policy's row: other models make the device slower for this one
function tableRate(here) {
  return here.slowdown * here.arrival_rate_hz;
}

// the row of maximum ages at this arrival rate; null for a table of batch sizes
function rowOfAges(view, rate) {
  const rows = view.max_ages;
  return rows.length === 0 ? null : rows.reduce((best, row) => Math.abs(row.rate_hz - rate) < Math.abs(best.rate_hz - rate) ? row : best);
}

// the current action as text
function describeAction(view, here) {
  const { queue_length: n, arrival_rate_hz: measured, oldest_age_ms: age, slowdown } = here, rate = tableRate(here);
  const others = slowdown >= 1.05 ? `, device ${slowdown.toPrecision(2)} times slower by other models` : "";
  const now = `${n} queued, ${measured < 0.01 ? 0 : +measured.toPrecision(3)} arrivals per second${others}: `;
  if (!n) return `${now}no request to launch`;
  const ages = rowOfAges(view, rate)?.max_age_ms;
  if (ages && rate < view.max_ages[0].rate_hz / 2) return `${now}launches as soon as the device is free`;
  if (ages) return `${now}the oldest waits ${age.toFixed(1)} ms, launches at ${ages[Math.min(n, ages.length - 1)].toFixed(1)} ms`;
  const nearest = (values, value) => values.reduce((best, v, i) => Math.abs(v - value) < Math.abs(values[best] - value) ? i : best, 0);
  const row = view.batch_size[view.rates_hz.length ? nearest(view.rates_hz, rate) : 0];
  const size = row[nearest(view.queue_lengths, n)];
  return now + (size ? `launches ${Math.min(n, size)} as soon as the device is free` : "waits for more");
}

function showCharts(state) {
  const span = Number(find("span").value), points = page.points.filter((p) => state.now - p.t <= span), profile = page.view.profile;
  const ago = points.map((p) => p.t - state.now);
  drawResponse(find("chart-response"), points, ago, span, state.slo_ms);
  drawRate(find("chart-rate"), points, ago, span);
  drawSizes(find("chart-sizes"), points, ago, span, profile.max_batch_size);
  drawQueue(find("chart-queue"), points, ago, span);
  showSpending(points, ago, span, profile);
  showProfile(state.observed, profile);
}

function showSpending(points, ago, span, profile) {
  const resource = RESOURCES[profile.resource];
  const source = profile.resource === "energy" ? `From the profile ${profile.name} (energies: ${profile.energy_source}).`
    : `Measured with each batch${profile.resource === "cpu_time" ? ", of the model's process" : ""}.`;
  for (const element of document.querySelectorAll(".resource-source")) text(element, source);
  drawSpending([find("chart-power"), find("chart-energy")], resource, profile.rate_unit, spending(points, resource), ago, span);
}

function showProfile(observed, { service_ms: times, cost, resource }) {
  const most = Math.max(...observed.map((o) => o[1]), 1);
  const dots = (y, label) => observed.map(([size, count, mean]) => ({ size, y: y(size, mean), width: 5 + 9 * Math.sqrt(count / most),
    text: `${label(mean)}${count} batches` }));
  drawProfile(find("chart-service"), ["Service time", "ms", "measured since the start"], times, dots((_, mean) => mean, (mean) => `${mean.toPrecision(4)} ms in `));
  const { batch, unit } = RESOURCES[resource];
  drawProfile(find("chart-zeta"), [batch, unit, "launched since the start"], cost, dots((size) => cost[size - 1], () => "launched: "));
}

function showAll() {
  if (page.last && page.view) show(page.last, true);
}

// user actions

async function send(path, settings, field) {
  const input = find(field), key = input.value || sessionStorage.getItem(field) || "";
  const headers = { ...settings.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...settings, headers }), content = await answer.json();
  if (answer.ok) {
    if (key) sessionStorage.setItem(field, key); // until the tab is closed
    return content;
  }
  if (answer.status === 401 || answer.status === 403) {
    sessionStorage.removeItem(field);
    for (const element of [input, ...input.labels, ...input.form.querySelectorAll("button")]) element.hidden = false;
    input.focus();
  }
  throw new Error(content.error);
}

function showResult(element, content, failed = false) {
  element.classList.toggle("error", failed);
  element.textContent = content;
}

async function swap(event) {
  event.preventDefault();
  const policy = find("policy").value.trim(), button = document.querySelector("#swap button"), result = find("swapped");
  button.disabled = true;
  showResult(result, "solving …");
  try {
    const settings = { method: "PUT", body: JSON.stringify({ policy }), headers: { "content-type": "application/json" } };
    const now = await send(`admin/models/${encodeURIComponent(page.model)}/policy`, settings, "admin-key");
    showResult(result, `The policy is now ${now.spec}.${now.warnings.length ? " See the warning above." : ""}`);
  } catch (error) {
    showResult(result, error.message, true);
  }
  button.disabled = false;
}

function choose() {
  page.model = find("model").value;
  page.device = Math.max(find("device").selectedIndex, 0);
  reset();
}

find("swap").addEventListener("submit", swap);
find("file").addEventListener("change", (event) => { selectFile(event.target.files[0]); event.target.value = ""; });
for (const id of ["sample", "unlock"]) find(id).addEventListener("submit", predict);
for (const id of ["model", "device"]) find(id).addEventListener("change", choose);
find("span").addEventListener("change", showAll);
for (const type of ["dragover", "dragleave", "drop"]) document.addEventListener(type, onDrag);
document.addEventListener("visibilitychange", showAll);
dark.addEventListener("change", showAll);
choose();
poll();
