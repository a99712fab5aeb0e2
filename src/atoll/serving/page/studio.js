"use strict";
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const KEPT = 48, FRAMES = 30;
const store = { get: key => { try { return sessionStorage.getItem(key); } catch { return null; } },
                set: (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* private */ } } };
let models = [], model = null, off = new Set(), running = null, shown = null, pinned = null, sheets = {};
const history_ = [];

function el(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "circle", "rect", "path", "line", "image", "text", "ellipse"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const colour = k => k < 8 ? `var(--e${k})` : `hsl(${(k * 137.5) % 360} 55% 50%)`;
const paintedBy = (node, k) => { node.style.setProperty("--c", colour(k)); return node; };
const leader = weights => weights.indexOf(Math.max(...weights));
const png = b64 => `data:image/png;base64,${b64}`;
const words = ["No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine"];

// --- the server ------------------------------------------------------------------------------------------------------

async function ask(path, options = {}) {
  const key = store.get("key");
  const headers = { ...(options.headers || {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status !== 401) return answer;
  const dialog = $("ask");
  if (!dialog.open) dialog.showModal();
  await new Promise(done => dialog.addEventListener("close", done, { once: true }));
  store.set("key", $("key").value.trim());
  return ask(path, options);
}

async function sentence(answer) {
  try { return (await answer.json()).error.message; } catch { return `the server answers ${answer.status}`; }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).split("\n").find(line => line.startsWith("data: "));
      text = text.slice(end + 2);
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}

// --- a stage: the image in a lagoon, the experts around it, the way from noise as a ring -----------------------------

class Stage {
  constructor(figure) {
    this.figure = figure;
    this.sea = figure.querySelector(".sea");
    this.caption = figure.querySelector("figcaption");
  }

  build(experts) {
    const around = 222, num = experts.length;
    const at = k => { const a = -Math.PI / 2 + (2 * Math.PI * (k + (num % 2 ? 0 : 0.5))) / num; return [around * Math.cos(a), around * Math.sin(a)]; };
    this.view = el("image", { x: -112, y: -112, width: 224, height: 224, class: "view", preserveAspectRatio: "xMidYMid slice" });
    this.empty = el("text", { class: "empty", y: 5 }, "your image forms here");
    this.arcs = el("g");
    this.beams = []; this.islands = [];
    const [wide, high] = [0, 1].map(i => Math.max(208, ...experts.map((_, k) => Math.abs(at(k)[i]) + 46)));
    const root = el("svg", { viewBox: `${-wide} ${-high} ${2 * wide} ${2 * high}`, role: "img", "aria-label": "The image, and the experts around it" });
    this.sea.style.aspectRatio = `${wide} / ${high}`;
    root.append(el("circle", { class: "lagoon", r: 204 }), el("circle", { class: "deep", r: 158 }), el("circle", { class: "track", r: 176 }), this.arcs);
    experts.forEach((expert, k) => {
      const [x, y] = at(k), beam = paintedBy(el("line", { class: "beam", x1: x, y1: y, x2: x * 0.42, y2: y * 0.42, "stroke-width": 6 }), k);
      this.beams.push(beam); root.append(beam);
    });
    root.append(el("rect", { class: "frame", x: -119, y: -119, width: 238, height: 238, rx: 16 }), this.view, this.empty);
    experts.forEach((expert, k) => {
      const [x, y] = at(k);
      const island = paintedBy(el("g", { class: "island", transform: `translate(${x} ${y})` },
        el("ellipse", { class: "shore", rx: 45, ry: 41, transform: `rotate(${k * 47})` }), el("circle", { class: "land", r: 35 }), el("text", {}, String(k))), k);
      island.addEventListener("click", () => toggle(k));
      this.islands.push(island); root.append(island);
      if (sheets[k]) this.land(k, sheets[k]);
    });
    this.sea.replaceChildren(root);
    this.mark();
  }

  // What an island has seen: the middle of its contact sheet, with its number beside it.
  land(k, { source, wide, high }) {
    const island = this.islands[k], scale = 330 / wide;
    if (!island || island.querySelector("image")) return;
    const text = island.querySelector("text"), side = k % 2 ? 26 : -26;
    text.before(el("image", { href: source, x: -165, y: -high * scale / 2, width: 330, height: high * scale }), el("circle", { class: "badge", cx: side, cy: 26, r: 14 }));
    text.setAttribute("x", side); text.setAttribute("y", 26);
  }

  clear() { this.arcs.replaceChildren(); this.works([]); }

  image(source, side) {
    this.view.setAttribute("href", source);
    this.view.classList.toggle("smooth", side > 96);
    this.empty.textContent = "";
  }

  works(weights) {
    this.beams.forEach((beam, k) => { beam.classList.toggle("works", (weights[k] || 0) > 0.02); beam.setAttribute("stroke-width", 3 + 7 * (weights[k] || 0)); });
    this.islands.forEach((island, k) => island.classList.toggle("works", (weights[k] || 0) > 0.02));
  }

  // The experts' weights from one share of the way to the next; each has its part of the ring's width.
  arc(from, to, weights) {
    let inner = 169;
    const point = (r, share) => { const a = -Math.PI / 2 + 2 * Math.PI * share; return `${(r * Math.cos(a)).toFixed(2)} ${(r * Math.sin(a)).toFixed(2)}`; };
    weights.forEach((weight, k) => {
      if (weight < 0.004) return;
      const r = inner + 7 * weight, end = Math.min(to + 0.002, from + 0.9999);  // a little over, so that no seam shows
      const path = el("path", { class: "arc", d: `M ${point(r, from)} A ${r} ${r} 0 ${end - from > 0.5 ? 1 : 0} 1 ${point(r, end)}`, "stroke-width": 14 * weight });
      path.style.stroke = colour(k);
      this.arcs.append(path);
      inner += 14 * weight;
    });
  }

  trace(evaluations) {
    this.arcs.replaceChildren();
    evaluations.forEach((one, i) => this.arc(i / evaluations.length, (i + 1) / evaluations.length, one.weights));
  }

  mark(without = []) {
    (this.islands || []).forEach((island, k) => { island.classList.toggle("off", off.has(k) || model.atoll.experts[k].place === "missing"); island.classList.toggle("absent", without.includes(k)); });
  }
}
const live = new Stage($("live")), still = new Stage($("pinned"));

// --- settings, and links that hold them ------------------------------------------------------------------------------

function settings() {
  return { prompt: $("prompt").value.trim(), negative: $("negative").value.trim(), seed: Number($("seed").value || 0), steps: Number($("steps").value),
           guidance: Number($("guidance").value), routing: $("routing").value, solver: $("solver").value, off: [...off].sort((a, b) => a - b), model: model.id };
}

function pick(id, value) {
  if (![...$(id).options].some(option => option.value === value)) $(id).append(el("option", { value }, value));
  $(id).value = value;
}

// A slider shall hold what a link says, also beyond its usual end or between its steps.
function slide(id, value) {
  const slider = $(id);
  slider.max = Math.max(Number(slider.max), value);
  if (value % Number(slider.step || 1)) slider.step = "any";
  slider.value = value;
}

function apply(made) {
  $("prompt").value = made.prompt; $("negative").value = made.negative || ""; $("seed").value = made.seed;
  slide("steps", made.steps); slide("guidance", made.guidance); pick("routing", made.routing); pick("solver", made.solver);
  off = new Set(made.off);
  refresh();
}

function link(made) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(made)) if (value !== "" && String(value) !== "") query.set(key, Array.isArray(value) ? value.join("-") : value);
  query.set("hash", model.atoll.hash.slice(0, 12));
  return `#${query}`;
}

function fromLink() {
  const query = new URLSearchParams(location.hash.slice(1));
  if (!query.has("seed")) return null;
  const number = (key, usual) => Number.isFinite(Number(query.get(key) ?? NaN)) && query.get(key) !== null ? Number(query.get(key)) : usual;
  const known = models.find(one => one.id === query.get("model"));
  if (known && known !== model) choose(known);
  return { prompt: query.get("prompt") || "", negative: query.get("negative") || "", seed: number("seed", 0), steps: number("steps", model.atoll.steps || 20),
           guidance: number("guidance", model.atoll.guidance), routing: query.get("routing") || "top1", solver: query.get("solver") || (model.atoll.steps ? "euler" : "multistep"),
           off: (query.get("off") || "").split("-").filter(Boolean).map(Number).filter(k => k < model.atoll.experts.length), hash: query.get("hash") };
}

function refresh() {
  $("steps-out").textContent = $("steps").value;
  $("guidance-out").textContent = Number($("guidance").value).toFixed(2).replace(/0$/, "");
  const made = settings();
  $("brief").textContent = `· seed ${made.seed} · ${made.steps} steps · guidance ${made.guidance} · ${made.routing.replace(":", " ")}`;
  document.querySelectorAll("#experts li").forEach((item, k) => {
    item.classList.toggle("off", off.has(k));
    const box = item.querySelector("input");
    box.checked = !off.has(k) && !box.disabled;
  });
  live.mark();
  const area = $("prompt"); area.style.height = "auto"; area.style.height = `${area.scrollHeight + 2}px`;
}

// --- painting --------------------------------------------------------------------------------------------------------

function say(text, bad = false) { $("status").textContent = text; $("status").classList.toggle("bad", bad); }

async function paint() {
  if (running) running.abort();
  const stop = running = new AbortController(), made = settings(), name = k => `expert ${k}`;
  const experts = able().filter(k => !off.has(k));
  if (!experts.length) { running = null; return say("All experts are switched off: switch one on.", true); }
  $("paint").textContent = "Stop"; $("paint").classList.add("stop");
  live.clear(); live.mark(); say("Waiting for a place …");
  const side = Number(model.atoll.size.split("x")[0]), frames = [];
  const body = { ...request(made), stream: true, partial_images: Math.min(made.steps, FRAMES), preview: "state", ...(off.size ? { experts } : {}) };
  try {
    const answer = await post(body, stop.signal);
    if (!answer.ok) throw new Error(await sentence(answer));
    let last = 0;
    for await (const event of events(answer)) {
      if (stop.signal.aborted) return;
      if (event.error) throw new Error(event.error.message);
      live.image(png(event.b64_json), side);
      if (event.type.endsWith("partial_image")) {
        frames.push({ image: png(event.b64_json), weights: event.weights });
        live.arc(last, event.step / made.steps, event.weights); last = event.step / made.steps;
        live.works(event.weights); shares(event.weights);
        const many = event.weights.filter(weight => weight > 0.02).length;
        say(`Step ${event.step} of ${made.steps}: ${many > 1 ? `${words[many] ? words[many].toLowerCase() : many} experts draw, most of all ${name(leader(event.weights))}` : `${name(leader(event.weights))} draws`}`);
        continue;
      }
      live.trace(event.trace); live.works([]); shares(event.shares);
      live.mark(event.without || []);
      finish({ made, frames, image: png(event.b64_json), trace: event.trace, shares: event.shares, without: event.without || [], side });
    }
  } catch (error) {
    if (error.name === "AbortError") { if (running === stop) say("Stopped."); }
    else { live.works([]); say(error.message || "The server does not answer.", true); }
  } finally {
    if (running === stop) { running = null; $("paint").textContent = "Paint"; $("paint").classList.remove("stop"); live.works([]); }
  }
}

function finish(work) {
  shown = work;
  const part = work.shares.map((share, k) => [share, k]).filter(([share]) => share > 0.005).sort((a, b) => b[0] - a[0]);
  const drew = part.map(([share, k]) => `expert ${k} ${Math.round(100 * share)}%`).join(", ");
  say(`Done: ${drew}${work.without.length ? `; expert ${work.without.join(", ")} was away` : ""}`);
  caption(live, work);
  film(work);
  if (pinned) caption(still, pinned);
  solos(work);
  for (const id of ["again", "each", "pin", "link"]) $(id).disabled = false;
  $("each").hidden = able().length < 2;
  const save = $("download");
  save.href = work.image; save.setAttribute("aria-disabled", "false"); save.removeAttribute("role");
  save.download = `${work.made.prompt.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60).replace(/^-|-$/g, "") || "atoll"}-${work.made.seed}.png`;
  history.replaceState(null, "", link(work.made));
  const known = history_.findIndex(old => JSON.stringify(old.made) === JSON.stringify(work.made));
  if (known >= 0) history_.splice(known, 1);
  history_.unshift(work); history_.length = Math.min(history_.length, KEPT);
  past();
}

function caption(stage, work) {
  const made = work.made, other = stage === live ? pinned && pinned.made : shown && shown.made;
  const differ = other ? ["prompt", "seed", "steps", "guidance", "routing", "solver", "negative"].filter(key => made[key] !== other[key]).map(key => key === "prompt" ? `“${made[key]}”` : `${key} ${made[key] || "none"}`) : [];
  if (other && String(made.off) !== String(other.off)) differ.push(made.off.length ? `without expert ${made.off.join(", ")}` : "all experts");
  stage.caption.textContent = other ? (differ.join(" · ") || "the same settings") : `${made.prompt || "no prompt"} · seed ${made.seed}${made.off.length ? ` · without expert ${made.off.join(", ")}` : ""}`;
}

function shares(weights) {
  document.querySelectorAll("#experts .share i").forEach((bar, k) => { bar.style.width = `${100 * (weights[k] || 0)}%`; });
  document.querySelectorAll("#experts .drew span").forEach((part, k) => { part.textContent = `drew ${Math.round(100 * (weights[k] || 0))}%`; });
}

// --- each expert alone -----------------------------------------------------------------------------------------------

const able = () => model.atoll.experts.filter(expert => expert.place !== "missing").map(expert => expert.number);

function request(made) {
  return { model: model.id, prompt: made.prompt, negative_prompt: made.negative, seed: made.seed, steps: made.steps, guidance: made.guidance, routing: made.routing, solver: made.solver };
}

function post(body, signal) {
  return ask("/v1/images/generations", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
}

async function each() {
  const work = shown, numbers = able();
  work.alone = Object.fromEntries(numbers.map(k => [k, null]));
  solos(work);
  $("solo").scrollIntoView({ block: "nearest", behavior: "smooth" });
  say("Each expert draws this alone …");
  try {
    await Promise.all(numbers.map(async k => {
      const answer = await post({ ...request(work.made), experts: [k] });
      if (!answer.ok) throw new Error(await sentence(answer));
      work.alone[k] = png((await answer.json()).data[0].b64_json);
      if (shown === work) solos(work);
    }));
    if (shown === work && !running) say("Done: the same prompt and seed, by each expert alone.");
  } catch (error) { say(error.message || "The server does not answer.", true); }
}

function solos(work) {
  $("solo").hidden = !work.alone;
  if (!work.alone) return;
  const smooth = work.side > 96 ? "view smooth" : "view";
  const items = Object.entries(work.alone).map(([k, image]) => paintedBy(el("li", {},
    image ? el("img", { src: image, alt: `Drawn by expert ${k} alone`, class: smooth }) : el("div", { class: "wait" }), `expert ${k} alone`), Number(k)));
  items.push(el("li", {}, el("img", { src: work.image, alt: "Drawn together", class: smooth }), work.made.off.length ? `without expert ${work.made.off.join(", ")}` : "together"));
  $("solos").style.setProperty("--num", items.length);
  $("solos").replaceChildren(...items);
}

function film(work) {
  $("film").hidden = false;
  $("frames").replaceChildren(...work.frames.map((frame, i) => {
    const image = paintedBy(el("img", { src: frame.image, alt: `Preview ${i + 1} of ${work.frames.length}, led by expert ${leader(frame.weights)}`, class: "view" }), leader(frame.weights));
    image.classList.toggle("smooth", work.side > 96);
    return image;
  }));
  $("band").replaceChildren(...work.trace.map(one => {
    const column = el("div");
    one.weights.forEach((weight, k) => { if (weight > 0.004) { const piece = paintedBy(el("i"), k); piece.style.flexGrow = weight; column.append(piece); } });
    return column;
  }));
}

function past() {
  $("past").hidden = history_.length < 2;
  $("history").replaceChildren(...history_.map(work => {
    const button = el("button", { type: "button", "aria-label": `Show again: ${work.made.prompt || "no prompt"}, seed ${work.made.seed}` },
      paintedBy(el("img", { src: work.image, alt: "", class: work.side > 96 ? "view smooth" : "view" }), leader(work.shares)));
    button.addEventListener("click", () => { if (running) running.abort(); show(work); scrollTo({ top: 0, behavior: "smooth" }); });
    return el("li", {}, button);
  }));
}

function show(work) {
  const known = models.find(one => one.id === work.made.model);
  if (known && known !== model) choose(known);
  apply(work.made);
  live.image(work.image, work.side); live.trace(work.trace); live.mark(work.without); shares(work.shares);
  finish(work);
}

function pin() {
  pinned = pinned ? null : shown;
  $("pin").setAttribute("aria-pressed", String(Boolean(pinned)));
  $("pin").textContent = pinned ? "Unpin" : "Pin to compare";
  $("pinned").hidden = !pinned;
  if (pinned) { still.build(model.atoll.experts); still.image(pinned.image, pinned.side); still.trace(pinned.trace); still.islands.forEach((island, k) => island.classList.toggle("off", pinned.made.off.includes(k))); caption(still, pinned); }
  if (shown) caption(live, shown);
}

function toggle(k) {
  if (model.atoll.experts[k].place === "missing") return;
  if (off.has(k)) off.delete(k); else off.add(k);
  refresh();
  if (shown) paint();
}

// --- the experts -----------------------------------------------------------------------------------------------------

const KINDS = { fm: "flow matching", ddpm: "predicts noise", "ddpm-min-snr": "predicts noise (min-SNR)", x0: "predicts the image", v: "v-prediction" };

function card(expert) {
  const k = expert.number, box = el("input", { type: "checkbox", role: "switch", id: `expert-${k}`, disabled: expert.place === "missing" ? "" : null });
  box.addEventListener("change", () => toggle(k));
  const item = paintedBy(el("li", {}, el("label", { class: "switch", for: `expert-${k}` }, `Expert ${k}`, box)), k);
  const learned = [KINDS[expert.objective] || expert.objective, expert.place === "elsewhere" ? "with its owner" : expert.place === "missing" ? "missing" : ""].filter(Boolean).join(" · ");
  item.append(el("p", {}, learned));
  if (expert.images) item.append(el("p", {}, `saw ${expert.images.toLocaleString("en")} images${expert.data ? ` of ${expert.data}` : ""}, and none of the others’`));
  const trained = [expert.samples && `${expert.samples.toLocaleString("en")} samples of training`, expert.license].filter(Boolean).join(" · ");
  if (trained) item.append(el("p", {}, trained));
  item.append(el("div", { class: "drew" }, el("div", { class: "share" }, el("i")), el("span")));
  if (expert.sheet) sheet(expert).then(({ source, wide, high }) => {
    sheets[k] = { source, wide, high };
    live.land(k, sheets[k]);
    const button = el("button", { type: "button", class: "thumb", "aria-label": `What expert ${k} was trained on` }, el("img", { src: source, alt: "" }));
    button.addEventListener("click", () => enlarge(expert, source));
    item.append(button);
  }, () => {});
  return item;
}

async function sheet(expert) {
  const answer = await ask(`/v1/sheets/${expert.number}?model=${encodeURIComponent(model.id)}`);
  if (!answer.ok) throw new Error();
  const image = new Image();
  image.src = URL.createObjectURL(await answer.blob());
  await image.decode();
  return { source: image.src, wide: image.naturalWidth, high: image.naturalHeight };
}

function enlarge(expert, source) {
  $("sheet-title").textContent = `What expert ${expert.number} was trained on`;
  const image = document.querySelector("#sheet img");
  image.src = source; image.alt = `Images of cluster ${expert.cluster}`;
  document.querySelector("#sheet .soft").textContent = "These are the images nearest to the centre of its cluster, at random, and the farthest. It has never seen those of the others.";
  $("sheet").showModal();
}

function choose(one) {
  model = one; off = new Set(); shown = null; pinned = null; sheets = {};
  $("model").value = one.id; $("pinned").hidden = true;
  const experts = one.atoll.experts, num = experts.filter(expert => expert.place !== "missing").length;
  $("headline").textContent = num > 1 ? `${words[num] || num} models that never met paint together.` : "One model paints.";
  if (num < 2) $("lede").textContent = "From noise to image, step by step.";
  slide("guidance", one.atoll.guidance);
  if (one.atoll.steps) { slide("steps", one.atoll.steps); pick("solver", "euler"); } // it was distilled to so many
  $("steps").disabled = $("solver").disabled = Boolean(one.atoll.steps);
  live.build(experts);
  $("experts").replaceChildren(...experts.map(card));
  $("about").textContent = `${one.id} · ${one.atoll.size} · licence ${one.atoll.license} · ${one.atoll.hash.slice(0, 12)}`;
  $("credits").hidden = !one.atoll.credits; document.querySelector("#who pre").textContent = one.atoll.credits || "";
  refresh();
}

// --- events ----------------------------------------------------------------------------------------------------------

const random = () => { $("seed").value = Math.floor(Math.random() * 1e9); refresh(); };
$("form").addEventListener("submit", event => { event.preventDefault(); if (running) running.abort(); else paint(); });
$("form").addEventListener("input", refresh);
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); paint(); } });
$("dice").addEventListener("click", random);
$("again").addEventListener("click", () => { random(); paint(); });
$("each").addEventListener("click", each);
$("credits").addEventListener("click", () => $("who").showModal());
$("pin").addEventListener("click", pin);
$("link").addEventListener("click", async () => {
  const url = location.href.split("#")[0] + link(shown.made);
  try { await navigator.clipboard.writeText(url); say("The link is copied: it gives this image again."); } catch { say(url); }
});
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
$("model").addEventListener("change", () => choose(models.find(one => one.id === $("model").value)));
addEventListener("hashchange", () => { const made = fromLink(); if (made && (!shown || link(shown.made) !== location.hash)) { apply(made); paint(); } });
addEventListener("keydown", event => {
  if (event.key === "Escape" && running) running.abort();
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey || !model) return;
  if (event.key === "/") { event.preventDefault(); $("prompt").focus(); }
  const k = Number(event.key);
  if (event.key >= "0" && event.key <= "9" && k < model.atoll.experts.length) toggle(k);
});

(async () => {
  try {
    const answer = await ask("/v1/models");
    if (!answer.ok) throw new Error(await sentence(answer));
    models = (await answer.json()).data;
    $("model").replaceChildren(...models.map(one => el("option", { value: one.id }, one.id)));
    document.querySelector(".model").hidden = models.length < 2;
    choose(models[0]); random();
    const made = fromLink();
    if (!made) return say("Describe something, and press Enter.");
    apply(made);
    if (made.hash && made.hash !== model.atoll.hash.slice(0, 12)) say("This link is of another version of the model: the image may differ.");
    await paint();
  } catch (error) { say(error.message, true); }
})();
