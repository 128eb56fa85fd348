// Runs in the driving page of browse_site.py: opens each page in an iframe, and sends back what it measured.

const wait = time => new Promise(done => setTimeout(done, time));
const send = what => fetch("/__result__", {method: "POST", body: JSON.stringify(what)});

async function load(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  const loaded = new Promise(done => { frame.onload = done; });
  frame.src = `/${page}`;
  document.body.append(frame);
  await loaded;
  await frame.contentDocument.fonts.ready;
  await wait(50); // the theme's scripts go on after the page has loaded
  return frame;
}

function measure(frame) {
  const page = frame.contentDocument, inner = frame.contentWindow.innerWidth;
  const scrolls = "pre, .md-typeset__scrollwrap, svg";
  const wider = [...page.querySelectorAll(".md-content *")].filter(
    x => x.getBoundingClientRect().right > inner + 1 && !x.parentElement.closest(scrolls) && !x.matches(scrolls));
  const boxes = [...page.querySelectorAll(".md-content pre > code, .md-typeset__scrollwrap")];
  return {
    inner, width: page.scrollingElement.scrollWidth, height: page.scrollingElement.scrollHeight,
    outside: wider.map(x => x.outerHTML.slice(0, 100)),
    cut: boxes.filter(x => x.scrollWidth > x.clientWidth + 1).map(longestLine),
    images: [...page.images].filter(x => !x.naturalWidth).map(x => x.src),
    columns: countColumns(page),
    faults: frame.contentWindow.faults,
  };
}

function longestLine(box) {
  const lines = box.innerText.split("\n").sort((a, b) => b.length - a.length);
  return `${box.matches("pre *") ? "code" : "table"} of ${box.scrollWidth} in ${box.clientWidth}: ${lines[0].slice(0, 120)}`;
}

// Characters that fit into a line of code that is not indented; null on a page without code.
function countColumns(page) {
  const box = page.querySelector(".md-content__inner > .highlight pre > code");
  if (!box) return null;
  const probe = page.createElement("span");
  probe.textContent = "0".repeat(100);
  box.append(probe);
  const style = page.defaultView.getComputedStyle(box), one = probe.getBoundingClientRect().width / 100;
  probe.remove();
  return Math.floor((box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)) / one);
}

async function search(frame, words) {
  const page = frame.contentDocument, field = page.querySelector("[data-md-component=search-query]");
  field.focus();
  field.value = words;
  field.dispatchEvent(new frame.contentWindow.KeyboardEvent("keyup", {bubbles: true}));
  for (let i = 0; i < 200; i++) {
    await wait(50);
    const found = [...page.querySelectorAll(".md-search-result__link")].map(x => x.getAttribute("href"));
    const meta = page.querySelector(".md-search-result__meta").textContent;
    if (found.length || /^No /.test(meta)) return found;
  }
  return null;
}

async function main({pages, widths, words}) {
  for (const width of widths)
    for (const page of pages) {
      const frame = await load(page, width);
      await send({page, window: width, ...measure(frame)});
      frame.remove();
    }
  for (const term of words) {
    const frame = await load("index.html", 1440);
    await send({words: term, found: await search(frame, term)});
    frame.remove();
  }
}
