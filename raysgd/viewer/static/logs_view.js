// The view of what workers print: live, searched, and at a moment of the timeline. Ray keeps the files on the workers' nodes.
"use strict";

if (MODE === "live") addView({ name: "logs", title: "Output" });
addState("rank", 0);
addState("stream", "stdout");
addState("at", -1);  // seconds since the start of the run; -1: the end

const TAIL_BYTES = 200_000, BLOCK_LINES = 200;
const output = { run: null, parts: [], sizes: {}, part: -1, begin: 0, end: 0, lines: [], problem: "", wasAtEnd: true, isBusy: false };

if (MODE === "live") addSection("logs", { id: "output", title: "Output of workers", show: showOutput, content: [
  h("div", { class: "bar" }, h("label", {}, "Run ", h("select", { id: "output-run", onchange: event => selectOnly([...page.runs.values()].find(run => String(run.id) === event.target.value)) })),
    h("label", {}, "Rank ", h("select", { id: "output-rank", onchange: event => { setState({ rank: Number(event.target.value) }); chooseOutput(-1); } })),
    h("label", {}, "Stream ", h("select", { id: "output-stream", onchange: event => { setState({ stream: event.target.value }); chooseOutput(-1); } },
      h("option", { value: "stdout", text: "stdout" }), h("option", { value: "stderr", text: "stderr" }))),
    h("label", {}, "Attempt ", h("select", { id: "output-attempt", onchange: event => chooseOutput(Number(event.target.value)) })),
    h("label", {}, "Seconds ", h("input", { type: "number", id: "output-at", min: 0, step: "any", placeholder: "end", onchange: event => goTo(event.target.value === "" ? -1 : Number(event.target.value)) })),
    h("label", {}, "Find ", h("input", { type: "search", id: "output-find", placeholder: "part of a line", oninput: () => drawOutput() })),
    h("button", { type: "button", id: "output-earlier", text: "Earlier lines", onclick: () => readEarlier() }),
    h("span", { class: "soft small", id: "output-count", role: "status" })),
  h("p", { class: "warn", id: "output-problem", role: "status" }),
  h("pre", { class: "output", id: "output", tabindex: 0, role: "region", "aria-label": "Lines" })] });

function showOutput(runs) {
  const run = runs[0];
  if (!run) { byId("output-count").textContent = "Select a run."; return; }
  fill(byId("output-run"), [...page.runs.values()].map(each => [each.id, each.name]), () => [...page.runs.values()].map(each => h("option", { value: each.id, text: each.name })));
  byId("output-run").value = run.id;
  if (output.run !== run) Object.assign(output, { run, part: -1, lines: [], begin: 0, end: 0 });
  refreshOutput();
}
async function refreshOutput() {  // asks for the parts, and for what is new in the part that is shown
  if (output.isBusy || !output.run) return;
  output.isBusy = true;
  try {
    const { run } = output;
    if (output.part < 0 || !run.isOver || !output.parts.length) Object.assign(output, await get(`api/runs/${run.id}/output`));
    if (output.run === run) {
      if (output.part < 0) await openPart(choosePart());
      else if (output.parts[output.part]) await readOn();
      drawOutput();
    }
  } catch (error) { output.problem = textOf(error); drawOutput(); }
  finally { output.isBusy = false; }
}
function choosePart(attempt = -1) {  // the newest attempt, or the one of the chosen moment
  const of = (part, i) => part.rank === state.rank && part.stream === state.stream ? [[part, i]] : [];
  let matching = output.parts.flatMap(of);
  if (!matching.length && output.parts.length) { state.rank = output.parts[0].rank; matching = output.parts.flatMap(of); }
  const wanted = attempt >= 0 ? attempt : state.at >= 0 ? placeOfMoment()[0] : -1;
  const chosen = matching.find(([part]) => part.attempt === wanted) || matching[matching.length - 1];
  return chosen ? chosen[1] : -1;
}
function placeOfMoment() {  // the attempt and the place in the file at the chosen moment
  const sizes = output.sizes[state.rank] || [], time = (output.run.facts ? output.run.facts.started : 0) + state.at;
  const entry = sizes.find(([at]) => at >= time) || sizes[sizes.length - 1];
  return entry ? [entry[1], entry[state.stream === "stdout" ? 2 : 3]] : [-1, 0];
}
async function openPart(place) {
  Object.assign(output, { part: place, lines: [], problem: "" });
  if (place < 0) return;
  const part = output.parts[place], sizes = (output.sizes[state.rank] || []).map(entry => entry[state.stream === "stdout" ? 2 : 3]);
  const end = state.at >= 0 ? placeOfMoment()[1] + TAIL_BYTES / 2 : part.end ?? sizes[sizes.length - 1] ?? part.begin;
  output.begin = output.end = Math.max(part.begin, end - TAIL_BYTES);
  output.wasAtEnd = state.at < 0;
  await readOn(true);
  if (state.at >= 0) requestAnimationFrame(() => byId("output").querySelector(".moment")?.scrollIntoView({ block: "center" }));
}
async function readOn(aligns = false) {
  for (let count = 0; count < 20; count++) {
    const before = output.end, answer = await get(`api/runs/${output.run.id}/output?part=${output.part}&from=${before}${aligns && count === 0 ? "&align" : ""}`);
    output.lines.push(...answer.lines);
    Object.assign(output, { end: answer.end, problem: answer.problem });
    if (answer.end === before || answer.end - output.begin > 20 * TAIL_BYTES) return;
  }
}
async function readEarlier() {
  const part = output.parts[output.part], kept = output.lines, end = output.end, first = kept.length ? kept[0][0] : output.begin;
  if (!part || output.isBusy) return;
  output.isBusy = true;
  try {
    const begin = Math.max(part.begin, first - 2 * TAIL_BYTES), answer = await get(`api/runs/${output.run.id}/output?part=${output.part}&from=${begin}&align`);
    Object.assign(output, { begin, end, problem: answer.problem, lines: [...answer.lines.filter(([place]) => place < first), ...kept] });
  } catch (error) { output.problem = textOf(error); }
  finally { output.isBusy = false; }
  drawOutput(false);
}
function chooseOutput(attempt) { setState({ at: -1 }); openPart(choosePart(attempt)).then(() => drawOutput(), error => { output.problem = textOf(error); drawOutput(); }); }
function goTo(at) { setState({ at }); openPart(choosePart()).then(() => drawOutput(), error => { output.problem = textOf(error); drawOutput(); }); }
// What a click in the timeline opens: the output of a rank around a moment.
function showOutputAt(run, rank, at) { setState({ rank, stream: "stdout", at }); output.run = null; selectOnly(run); openView("logs"); }

function drawOutput(follows = true) {
  const { parts, lines } = output, part = parts[output.part], element = byId("output"), words = byId("output-find").value.toLowerCase();
  const ranks = [...new Set(parts.map(each => each.rank))], attempts = parts.filter(each => each.rank === state.rank && each.stream === state.stream).map(each => each.attempt);
  fill(byId("output-rank"), ranks, () => ranks.map(each => h("option", { value: each, text: each })));
  fill(byId("output-attempt"), attempts, () => attempts.map(each => h("option", { value: each, text: each })));
  byId("output-rank").value = state.rank; byId("output-stream").value = state.stream;
  if (part) byId("output-attempt").value = part.attempt;
  if (document.activeElement !== byId("output-at")) byId("output-at").value = state.at >= 0 ? Number(state.at.toPrecision(6)) : "";
  const shown = words ? lines.filter(([, text]) => text.toLowerCase().includes(words)) : lines;
  byId("output-problem").textContent = output.problem;
  byId("output-earlier").disabled = !part || output.begin <= part.begin;
  byId("output-count").textContent = !parts.length ? "This run's files do not say where its output is." : `${shown.length} of ${lines.length} lines${part && output.begin > part.begin ? ", earlier ones are not read" : ""}${part ? `, on ${part.node}` : ""}`;
  const key = JSON.stringify([output.part, output.run && output.run.id, words, shown.length, shown.length ? shown[0][0] : -1, output.end, state.at]);
  if (element.shown === key) return;
  element.shown = key;
  const isAtEnd = follows && state.at < 0 && (output.wasAtEnd || element.scrollHeight - element.scrollTop - element.clientHeight < 40), fromEnd = element.scrollHeight - element.scrollTop;
  const started = output.run && output.run.facts ? output.run.facts.started : 0, sizes = (output.sizes[state.rank] || []).filter(([, attempt]) => part && attempt === part.attempt);
  const column = state.stream === "stdout" ? 2 : 3, moment = state.at >= 0 ? placeOfMoment()[1] : -1;
  let at = 0, before = "", hasMoment = false;
  const blocks = [];
  for (let i = 0; i < shown.length; i += BLOCK_LINES) {
    blocks.push(h("div", { class: "block" }, ...shown.slice(i, i + BLOCK_LINES).map(([place, text]) => {
      while (at < sizes.length - 1 && sizes[at][column] <= place) at += 1;
      const time = sizes.length ? seconds(Math.max(0, sizes[at][0] - started)) : "", isMoment = moment >= 0 && !hasMoment && (place >= moment || i + BLOCK_LINES >= shown.length && place === shown[shown.length - 1][0]);
      hasMoment = hasMoment || isMoment;
      const mark = h("span", { class: "time", text: time === before ? "" : time });
      before = time;
      return h("div", isMoment ? { class: "line moment" } : { class: "line" }, mark, ...markFound(text, words));
    })));
  }
  element.replaceChildren(...blocks);
  output.wasAtEnd = false;
  if (isAtEnd) element.scrollTop = element.scrollHeight;
  else if (!follows) element.scrollTop = element.scrollHeight - fromEnd;
}
function markFound(text, words) {  // the text, with what was searched marked
  const at = words ? text.toLowerCase().indexOf(words) : -1;
  return at < 0 ? [text] : [text.slice(0, at), h("mark", { text: text.slice(at, at + words.length) }), text.slice(at + words.length)];
}
