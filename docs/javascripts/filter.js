// A page with an input of class "filter" shows only the rows of its tables, and the entries of its lists, that have all words
// of the input.
for (const input of document.querySelectorAll("input.filter")) {
  const entries = [...input.closest("article").querySelectorAll("tbody tr, li")]
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/)
    for (const entry of entries) {
      const text = entry.textContent.toLowerCase()
      entry.hidden = !words.every(word => text.includes(word))
    }
  })
}
