"use strict";
(() => {
  const { show, element, number, bytes } = globalThis.prefixTree;
  const at = (id) => document.getElementById(id), KEY = "radixcache-admin-key";
  const WIDTH = 600, HEIGHT = 100, SMOOTHED = 10, LEAST_MS = 1000;
  const NO_LIMIT = 2 ** 60;
  let seen = "";

  // A large tree takes its time to describe: asking is never more than a fifth of the server's and the reader's time.
  async function follow() {
    const began = performance.now();
    if (await ask()) setTimeout(follow, Math.max(LEAST_MS, 4 * (performance.now() - began)));
  }

  // The path is relative, for servers behind a prefix; the key goes into a header, never into an address.
  async function ask() {
    const key = sessionStorage.getItem(KEY), query = new URLSearchParams({ seen, model: at("model").value });
    try {
      const answer = await fetch(`cache/state?${query}`, { headers: key ? { "x-api-key": key } : {}, cache: "no-store" });
      const state = await answer.json();
      at("trouble").textContent = answer.ok ? "" : state.error.message;
      if (answer.ok) draw(state);
      else if (answer.status === 401 || answer.status === 403) {
        at("ask").hidden = false;
        return false;
      }
    } catch (error) {
      at("trouble").textContent = `No answer: ${error.message}`;
    }
    return true;
  }

  at("ask").onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, at("key").value);
    at("key").value = "";
    at("ask").hidden = true;
    follow();
  };
  at("model").onchange = () => { seen = ""; };

  function draw(state) {
    at("now").textContent = `${number(state.running)} running, ${number(state.waiting)} waiting.`;
    drawModels(state);
    drawRate(state.points);
    drawBytes(state.points);
    drawDisk(state.disk);
    at("requests").replaceChildren(...state.requests.map(drawRequest));
    if (!state.tree) return;
    seen = state.tree.version;
    at("totals").textContent = `${state.tree.totals} \u00b7 ${state.tree.about}`;
    show(state.tree);
  }

  function drawModels({ models, model }) {
    at("models").hidden = models.length < 2;
    if (at("model").options.length !== models.length || [...at("model").options].some((o, i) => o.value !== models[i]))
      at("model").replaceChildren(...models.map((name) => new Option(name, name)));
    at("model").value = model;
  }

  function drawDisk(lines) {
    const [heading] = at("disk").children;
    at("disk").replaceChildren(heading, ...lines.map((line) => element("div", "", line)));
    at("disk").hidden = !lines.length;
  }

  function drawRequest(request) {
    const row = element("tr"), cell = (value, name) => row.append(element("td", name, value));
    const why = Object.entries(request.short).map(([reason, n]) => `${number(n)} ${reason.replaceAll("_", " ")}`);
    if (request.note) why.push(request.note);
    const rounded = (value) => (value === null ? "" : number(Math.round(10 * value) / 10));
    cell(new Date(1000 * request.time_s).toLocaleTimeString());
    cell(request.model);
    cell(request.namespace);
    cell(number(request.prompt_tokens), "n");
    cell(number(request.cached_tokens), "n");
    cell(why.join(", "));
    cell(number(request.completion_tokens), "n");
    for (const value of [request.queue_ms, request.ttft_ms, request.tokens_per_s]) cell(rounded(value), "n");
    cell(request.outcome);
    return row;
  }

  // The share of each request's prompt that was reused, together with those of a few requests before it.
  function drawRate(points) {
    const rates = points.map((_, last) => {
      const some = points.slice(Math.max(0, last + 1 - SMOOTHED), last + 1);
      return total(some, "cached_tokens") / Math.max(1, total(some, "prompt_tokens"));
    });
    const all = total(points, "cached_tokens") / Math.max(1, total(points, "prompt_tokens"));
    at("rate-words").textContent = points.length
      ? `Reused: ${(100 * all).toFixed(1)} % of the prompt tokens of ${number(points.length)} requests` : "No requests yet";
    at("rate").replaceChildren(path("line", line(points, rates, 1)));
  }

  function drawBytes(points) {
    const last = points.at(-1), live = points.map((p) => p.live_bytes);
    const held = points.map((p) => p.live_bytes + p.paged_bytes), budget = last ? last.budget_bytes : NO_LIMIT;
    const top = Math.max(1, ...held) * 1.1, budgetShown = Math.min(budget, top);
    const limit = budget < NO_LIMIT ? ` of ${bytes(budget)}` : "";
    at("bytes-words").textContent = last
      ? `Held: ${bytes(last.live_bytes)} live, ${bytes(last.paged_bytes)} paged${limit}` : "";
    at("bytes").replaceChildren(
      path("paged", area(points, held, top)), path("live", area(points, live, top)),
      ...(budgetShown < top ? [path("budget", `M0 ${HEIGHT * (1 - budget / top)}H${WIDTH}`)] : []));
  }

  const total = (points, name) => points.reduce((sum, point) => sum + point[name], 0);

  function line(points, values, top) {
    if (!points.length) return "";
    const first = points[0].time_s, span = Math.max(1e-3, points.at(-1).time_s - first);
    return points.map(({ time_s }, index) =>
      `${index ? "L" : "M"}${(WIDTH * (time_s - first)) / span} ${HEIGHT * (1 - values[index] / top)}`).join("");
  }

  const area = (points, values, top) => points.length && `${line(points, values, top)}V${HEIGHT}H0Z`;

  function path(name, way) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
    made.setAttribute("class", name);
    made.setAttribute("d", way || "M0 0");
    return made;
  }

  follow();
})();
