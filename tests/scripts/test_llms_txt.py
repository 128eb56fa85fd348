"""llms.txt lists the pages of the menu, in its order, with a sentence on each."""

from types import SimpleNamespace

import pytest

from scripts import llms_txt


def make_pages(*pages):
    made = []
    for section, title, content in pages:
        ancestors = [SimpleNamespace(title=name) for name in reversed(section)]
        page = SimpleNamespace(title=title, ancestors=ancestors, content=content, url=f"{title.lower()}.html")
        page.canonical_url = page.previous_page = page.next_page = None
        if made:
            page.previous_page = made[-1]
            made[-1].next_page = page
        made.append(page)
    return made


@pytest.mark.parametrize(
    "content, summary",
    [
        ("<h1>T</h1><p>Train a <code>Mamba</code> &amp; more. Then\nmore.</p>", "Train a Mamba & more."),
        ('<p class="lead">Version 1.5 of\nit: yes</p>', "Version 1.5 of it:"),
        ("<h1>No text</h1>", ""),
    ],
)
def test_summary_is_the_first_sentence(content, summary):
    assert llms_txt.summarize(content) == summary


def test_file_follows_the_menu():
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    pages = make_pages(
        (["Start"], "Home", "<p>A library.</p>"),
        (["Scale", "Hosts"], "Slurm", "<p>Many hosts.</p>"),
        (["Scale", "Hosts"], "Cloud", ""),
    )
    pages[1].canonical_url = "https://example.org/slurm.html"
    lonely = make_pages(([], "Not in the menu", ""))
    files = Files([])
    listed = SimpleNamespace(
        documentation_pages=lambda: [SimpleNamespace(page=page) for page in (pages[2], *lonely, pages[0], pages[1])],
        append=files.append,
    )
    config = MkDocsConfig()
    config.load_dict({"site_name": "Zoo", "site_description": "Models.", "use_directory_urls": False, "plugins": []})
    config.validate()
    config.plugins._current_plugin = None
    llms_txt.on_env(None, config=config, files=listed)
    (file,) = files
    assert file.content_string == (
        "# Zoo\n\n> Models.\n\n## Start\n\n- [Home](home.html): A library.\n\n"
        "## Scale: Hosts\n\n- [Slurm](https://example.org/slurm.html): Many hosts.\n- [Cloud](cloud.html)\n"
    )
