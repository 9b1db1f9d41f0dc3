"use strict";
(() => {
  const { show, mark, element, number, bytes } = globalThis.prefixTree;
  const at = (id) => document.getElementById(id), KEY = "radixcache-admin-key";
  const WIDTH = 600, HEIGHT = 100, SMOOTHED = 10, LEAST_MS = 1000;
  const NO_LIMIT = 2 ** 60;
  const rounded = (value) => (value === null ? "" : number(Math.round(10 * value) / 10));
  const seconds = (value) => (value < 0.95 ? `${(value || 0).toFixed(2)} s` : `${rounded(value)} s`);
  // Name, class, and what a request shows there; a column that is empty in all requests is left out.
  const COLUMNS = [
    ["ended", "", (r) => new Date(1000 * r.time_s).toLocaleTimeString()],
    ["model", "", (r) => r.model.split("/").at(-1)],
    ["tenant", "", (r) => r.namespace],
    ["prompt", "n", (r) => number(r.prompt_tokens)],
    ["reused", "n", (r) => number(r.cached_tokens)],
    ["%", "n", (r) => (r.prompt_tokens ? ((100 * r.cached_tokens) / r.prompt_tokens).toFixed(1) : "")],
    ["saved", "n", (r) => (r.saved_s >= 0.005 ? seconds(r.saved_s) : "")],
    ["why not more", "why", why],
    ["generated", "n", (r) => number(r.completion_tokens)],
    ["drafted", "n", (r) => (r.accepted_tokens + r.rejected_tokens ? number(r.accepted_tokens) : "")],
    ["queued ms", "n", (r) => rounded(r.queue_ms)],
    ["TTFT ms", "n", (r) => rounded(r.ttft_ms)],
    ["tokens/s", "n", (r) => rounded(r.tokens_per_s)],
    ["outcome", "", (r) => r.outcome],
  ];
  // The request whose details are shown, and these details.
  let seen = "", chosen = "", details = null, latest = [];

  // A large tree takes its time to describe: asking is never more than a fifth of the server's and the reader's time.
  async function follow() {
    const began = performance.now();
    if (await ask()) setTimeout(follow, Math.max(LEAST_MS, 4 * (performance.now() - began)));
  }

  // The path is relative, for servers behind a prefix; the key goes into a header, never into an address.
  function get(path) {
    const key = sessionStorage.getItem(KEY);
    return fetch(path, { headers: key ? { "x-api-key": key } : {}, cache: "no-store" });
  }

  async function ask() {
    try {
      const answer = await get(`cache/state?${new URLSearchParams({ seen, model: at("model").value })}`);
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
    drawRefused(state.refused);
    // Rows that stay keep the keyboard's focus.
    if (JSON.stringify(latest) !== JSON.stringify(state.requests)) {
      latest = state.requests;
      drawRequests();
    }
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

  function drawRefused(refused) {
    const lines = refused.map(({ time_s, route, status, reason }) =>
      element("div", "", `${new Date(1000 * time_s).toLocaleTimeString()} \u00b7 ${status} ${route} ${reason}`));
    at("refused").lastElementChild.replaceChildren(...lines);
    at("refused").hidden = !lines.length;
  }

  function why(request) {
    const words = (reason) => (reason === "diverged" && request.fork_words) || reason.replaceAll("_", " ");
    const found = Object.entries(request.short).map(([reason, n]) => `${number(n)} ${words(reason)}`);
    if (request.note) found.push(request.note);
    return found.join(", ");
  }

  function drawRequests() {
    const columns = COLUMNS.filter(([, , text]) => latest.some((request) => text(request)));
    at("table").querySelector("thead tr").replaceChildren(...columns.map(([name, kind]) => element("th", kind, name)));
    at("requests").replaceChildren(...latest.flatMap((request) => drawRequest(request, columns)));
  }

  function drawRequest(request, columns) {
    const row = element("tr", request.id === chosen ? "chosen" : ""), button = element("button", "");
    for (const [name, kind, text] of columns) {
      const cell = element("td", kind, text(request));
      cell.dataset.name = name;
      if (name === "model") cell.title = request.model;
      row.append(cell);
    }
    button.textContent = row.cells[0].textContent;
    button.setAttribute("aria-expanded", request.id === chosen);
    row.cells[0].replaceChildren(button);
    row.onclick = () => choose(request);
    return request.id === chosen && details ? [row, drawDetails(columns.length)] : [row];
  }

  async function choose({ id, namespace }) {
    [chosen, details] = [chosen === id ? "" : id, null];
    if (chosen) {
      try {
        const answer = await get(`cache/requests/${id}`), found = await answer.json();
        if (chosen !== id) return;
        details = answer.ok ? found : null;
        at("trouble").textContent = answer.ok ? "" : found.error.message;
      } catch (error) {
        at("trouble").textContent = `No answer: ${error.message}`;
      }
    }
    mark(namespace, details ? details.path_now : []);
    drawRequests();
  }

  // The prompt as a bar: what was reused, and what was not, by why; lines where nodes of the tree ended; the fork.
  function drawDetails(columns) {
    const { prompt_tokens: total, gaps, path, fork, hints } = details, row = element("tr", "details"), cell = element("div");
    const bar = element("div", "prompt"), place = (start) => `${(100 * start) / Math.max(1, total)}%`;
    const part = (name, start, end, title) => {
      const made = element("i", name);
      made.style.left = place(start);
      made.style.width = place(end - start);
      made.title = title;
      bar.append(made);
    };
    const reused = gaps.length ? gaps[0].start : total;
    part("reused", 0, reused, `[0, ${number(reused)}) reused`);
    for (const { start, end, reason, words } of gaps) part(reason, start, end, words);
    for (const end of path) if (end < total) part("node", end, end, `a node of the tree ended at ${number(end)}`);
    if (fork) part("fork", fork.start, fork.start, fork.words);
    const lines = [`[0, ${number(reused)})  ${number(reused)} tokens reused`];
    // The texts of the fork are shown below.
    lines.push(...gaps.map(({ words }) => words.replace(/(from a stored path).*/s, "$1")), ...hints.map((hint) => `hint: ${hint}`));
    cell.append(bar, element("div", "ends", "0"), ...lines.map((line) => element("div", "gap", line)));
    bar.nextSibling.append(element("span", "", `${number(total)} tokens`));
    if (fork) {
      cell.append(element("h3", "", fork.words));
      if (fork.hint) cell.append(element("div", "gap", fork.hint));
      for (const [name, text] of [["before", fork.before], ["stored", fork.stored], ["asked", fork.asked]]) {
        if (text === null) continue;
        const line = element("div", "text", `${name} `);
        line.append(element("bdi", "", text));
        cell.append(line);
      }
      if (fork.asked === null) cell.append(element("div", "text", "The texts are shown with --show-text."));
    }
    row.append(element("td"));
    row.cells[0].colSpan = columns;
    row.cells[0].append(cell);
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
      ? `Reused: ${(100 * all).toFixed(1)} % of the prompt tokens of ${number(points.length)} requests, about ` +
        `${seconds(total(points, "saved_s"))} of prefill saved` : "No requests yet";
    at("rate").replaceChildren(path("line", line(points, rates, 1)));
    for (const times of document.querySelectorAll(".times"))
      for (const [place, point] of [[times.firstElementChild, points[0]], [times.lastElementChild, points.at(-1)]])
        place.textContent = point ? new Date(1000 * point.time_s).toLocaleTimeString() : "";
  }

  function drawBytes(points) {
    const last = points.at(-1), live = points.map((p) => p.live_bytes);
    const held = points.map((p) => p.live_bytes + p.paged_bytes), budget = last ? last.budget_bytes : NO_LIMIT;
    const top = Math.max(1, ...held) * 1.1, budgetShown = Math.min(budget, top);
    const limit = budget < NO_LIMIT ? ` of ${bytes(budget)}` : "";
    at("bytes-words").textContent = last
      ? `Held: ${bytes(last.live_bytes)} live, ${bytes(last.paged_bytes)} paged${limit}` : "";
    at("bytes-top").textContent = last ? bytes(Math.round(top)) : "";
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
