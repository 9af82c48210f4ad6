"use strict";
// The form of the model that is shown, its call of /predict, and the response.
const SHOWN = 20, CHARACTERS = 2000, FACTS = ["model", "batch_size", "waiting_ms", "service_ms", "energy_mj", "energy_source",
  "cpu_ms"];
let chosen = null; // the file

function make(tag, content = "", more = {}) {
  return Object.assign(document.createElement(tag), { textContent: content, ...more });
}

// the form

async function refreshForm(model) {
  const form = await get("live/form", { model });
  if (model === page.model) showForm(form);
}

function showForm(form) {
  const [first] = form.fields, file = first.control === "file";
  page.form = form;
  find("drop").hidden = !file;
  find("sample").hidden = file;
  find("fields").replaceChildren(...(file ? [] : form.fields.map(controlOf)));
  find("file").accept = first.accept;
  text(find("file-note"), file ? first.note : "");
  text(find("curl"), form.curl);
  showFile(null);
  showResult(find("answer"), "");
}

function controlOf(field) {
  const label = make("label"), number = field.control === "number";
  const input = make(number ? "input" : "textarea", "", number ? { type: "number", step: "any", required: true } : { rows: 2, spellcheck: false });
  if (field.control === "json" && field.shape.length) input.placeholder = `empty: ${field.example} everywhere`;
  else input.value = field.example;
  field.input = input;
  label.append(make("span", field.name), " ", make("span", field.note, { className: "small" }), input);
  return label;
}

// the value of a field as JSON text, so that large integers keep their digits
function valueOf({ name, control, shape, example, input }) {
  const typed = control === "text" ? JSON.stringify(input.value) : input.value.trim();
  try {
    JSON.parse(typed || example);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
  if (control === "json" && typed) return typed;
  return shape.reduceRight((value, size) => `[${Array(size).fill(value)}]`, typed || example);
}

function bodyOf({ fields, nested_in: key }) {
  if (fields[0].control === "file") return chosen;
  const body = `{${fields.map((field) => `${JSON.stringify(field.name)}: ${valueOf(field)}`)}}`;
  return key ? `{${JSON.stringify(key)}: ${body}}` : body;
}

function selectFile(file) {
  if (!file || find("drop").hidden) return;
  showFile(file);
  predict();
}

function showFile(file) {
  const preview = find("preview");
  chosen = file;
  URL.revokeObjectURL(preview.src);
  preview.hidden = !file?.type.startsWith("image/");
  if (!preview.hidden) Object.assign(preview, { src: URL.createObjectURL(file), alt: `the image ${file.name}` });
}

function onDrag(event) {
  event.preventDefault();
  find("drop").classList.toggle("over", event.type === "dragover");
  if (event.type === "drop") selectFile(event.dataTransfer.files[0]);
}

async function predict(event) {
  event?.preventDefault();
  const { form } = page, element = find("answer");
  const show = (...content) => { if (form === page.form) showResult(element, ...content); }; // still the same model
  try {
    const body = bodyOf(form);
    if (!body) return;
    show("predicting …");
    const answer = await send(`predict/${encodeURIComponent(form.model)}`, { method: "POST", body }, "predict-key");
    show("");
    if (form === page.form) element.append(...partsOf(answer, form.outputs), facts(answer));
  } catch (error) {
    show(error.message, true);
  }
}

// the response

const renderers = { predictions: classList, outputs: outputTable };

function partsOf(answer, datatypes) {
  const keys = Object.keys(answer).filter((key) => !FACTS.includes(key));
  return keys.map((key) => renderers[key]?.(answer[key], datatypes) ?? make("p", `${key}: ${JSON.stringify(answer[key])}`));
}

function facts({ batch_size: size, waiting_ms: waiting, service_ms: service, energy_mj: energy, energy_source: source, cpu_ms: cpu }) {
  const joules = energy === null ? "energy unknown" : `${energy} mJ (${source})`;
  return make("p", `Batch size ${size}, waiting time ${waiting} ms, service time ${service} ms, ${joules}${cpu === undefined ? "" : `, CPU time ${cpu} ms`}.`);
}

function classList(predictions) {
  const list = make("ol");
  for (const { label, probability } of predictions) {
    const entry = make("li");
    entry.append(make("span", label), make("span", `${(100 * probability).toPrecision(3)} %`));
    list.append(entry);
  }
  return list;
}

function* leaves(value) {
  if (Array.isArray(value)) for (const item of value) yield* leaves(item);
  else yield value;
}

function shapeOf(value) {
  return Array.isArray(value) ? [value.length, ...shapeOf(value[0])] : [];
}

function shorten(content, most) {
  return content.length > most ? `${content.slice(0, most)} … ${content.length - most} more characters` : content;
}

function showValue(value) {
  return typeof value === "number" ? String(+value.toPrecision(5)) : shorten(JSON.stringify(value), CHARACTERS / SHOWN);
}

// tensors: a row for each output, and below it its first values; what a model renders itself is shown as JSON
function outputTable(outputs, datatypes) {
  if (!Object.keys(datatypes).length) return make("pre", shorten(JSON.stringify(outputs, null, 1), CHARACTERS));
  const table = make("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  for (const name of ["output", "datatype", "shape"]) head.append(make("th", name, { scope: "col" }));
  for (const [name, value] of Object.entries(outputs)) {
    const row = body.insertRow(), shape = shapeOf(value), first = [];
    for (const content of [name, datatypes[name], `[${shape.join(", ")}]`]) row.insertCell().textContent = content;
    for (const leaf of leaves(value)) if (first.push(showValue(leaf)) === SHOWN) break;
    const more = shape.reduce((product, size) => product * size, 1) - first.length;
    const cell = body.insertRow().insertCell();
    cell.colSpan = 3;
    cell.textContent = first.join(", ") + (more ? `, … ${more} more` : "");
  }
  return table;
}
