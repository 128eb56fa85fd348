// Ask the search of a built site, as a page does: `node ask_search.js SITE < words.json` prints what it finds.
// The site's own worker runs in a context of its own, which has what a browser gives to a worker and a search needs.
const fs = require("fs"), path = require("path"), vm = require("vm");

const SETUP = 0, QUERY = 2; // of the theme's messages

const site = process.argv[2];
const folder = path.join(site, "assets/javascripts/workers");
const file = fs.readdirSync(folder).find(name => /^search\..*\.js$/.test(name));
let listen, answer, warnings;
const worker = {
  addEventListener: (_, listener) => { listen = listener; },
  postMessage: data => answer(data),
  console: { log: () => {}, warn: (...words) => warnings.push(words.join(" ")) },
};
worker.self = worker;
vm.runInNewContext(fs.readFileSync(path.join(folder, file), "utf8"), worker);

function send(type, data) {
  warnings = [];
  return new Promise(resolve => { answer = resolve; listen({ data: { type, data } }); });
}

async function main() {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await send(SETUP, { ...index, options: { suggest: false } });
  const found = [];
  for (const words of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const { data } = await send(QUERY, words);
    found.push({ words, found: data.items.map(sections => sections[0].location), warnings });
  }
  console.log(JSON.stringify(found));
}

main();
