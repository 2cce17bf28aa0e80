// Pages that are opened as files cannot be fetched: take what search results quote from search_texts.js.
if (location.protocol === "file:") {
  const root = document.documentElement.dataset.content_root;
  const loaded = new Promise((done) => {
    const script = document.createElement("script");
    script.src = root + "_static/search_texts.js";
    script.onload = done;
    document.head.append(script);
  });
  window.fetch = async (url) => {
    await loaded;
    const page = document.createElement("div");
    page.setAttribute("role", "main");
    page.textContent = window.searchTexts[url.slice(root.length).replace(/\.html$/, "")];
    return { text: async () => page.outerHTML };
  };
}
