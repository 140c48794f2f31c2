"use strict";
// Log in with the code behind the '#' of a link, and load the main part of a page again when it has changed.

(() => {
  const form = document.getElementById("login");
  if (form && location.hash.length > 1) {
    form.elements.code.value = location.hash.slice(1);
    history.replaceState(null, "", location.pathname); // the code stays in no history
    form.requestSubmit();
  }

  const main = document.querySelector("main[data-live]");
  if (!main || !window.EventSource) return;
  const status = document.getElementById("live");
  let source = null;
  let loading = false;
  let again = false;

  function show(text, problem) {
    status.textContent = text;
    status.classList.toggle("problem", problem);
    status.hidden = false;
  }

  // The focused link or button is found again by its place among the others; a field in use is left alone.
  function places() {
    return [...main.querySelectorAll("a[href], button, summary, [tabindex]")];
  }

  function inUse() {
    const active = document.activeElement;
    const field = active && main.contains(active) && active.matches("input, select, textarea");
    const selection = getSelection();
    return field || (!selection.isCollapsed && main.contains(selection.anchorNode));
  }

  function swap(html) {
    const focused = places().indexOf(document.activeElement);
    const opened = [...main.querySelectorAll("details")].map((part) => part.open);
    main.innerHTML = html;
    main.querySelectorAll("details").forEach((part, place) => (part.open = opened[place] ?? part.open));
    if (focused >= 0) places()[focused]?.focus({ preventScroll: true });
  }

  async function load() {
    if (loading) {
      again = true;
      return;
    }
    loading = true;
    try {
      const answer = await fetch(location.href, { headers: { "x-fragment": "main" }, redirect: "error" });
      if (answer.status === 401) {
        location.assign("/login");
      } else if (answer.status === 503) {
        show("The database does not answer: what is shown here is old", true);
        setTimeout(load, 5000);
      } else if (answer.ok && !inUse()) {
        swap(await answer.text());
        show("Live", false);
      }
    } catch {
      show("Not connected: what is shown here is old", true);
    }
    loading = false;
    if (again) {
      again = false;
      load();
    }
  }

  function open() {
    if (source || document.hidden) return;
    source = new EventSource(`/live?page=${encodeURIComponent(main.dataset.live)}`);
    source.addEventListener("open", () => show("Live", false));
    source.addEventListener("changed", load);
    source.addEventListener("error", () => {
      if (source.readyState !== EventSource.CLOSED) {
        show("Not connected: what is shown here is old", true);
        return;
      }
      close();
      load();
      setTimeout(open, 5000);
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
    } else {
      load();
      open();
    }
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
})();
