"""MkDocs hook: link the site to the repository that it is built from, a fork's to the fork.

The address is `repo_url` of mkdocs.yml or, as long as it has none, that of git's remote `origin`. In commands of a page
it replaces "git+REPOSITORY", and the comment on that word goes. Without an address the site has no link, and both stay.
"""

import re
import subprocess
from pathlib import Path

REMOTE = re.compile(
    r"(?:https?://|ssh://)?(?:[\w.-]+(?::[^@/]*)?@)?(?P<host>[\w-]+(?:\.[\w-]+)+)(?::\d+/|[:/])(?P<path>[\w./~-]+)"
)
COMMENT = re.compile(r"^# REPOSITORY is .*\n", re.MULTILINE)


def find_repository(root: Path) -> str | None:
    """Return the address of git's remote `origin` as a page to open, without a user's name or password."""
    command = ["git", "config", "--get", "remote.origin.url"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    remote = REMOTE.fullmatch(done.stdout.strip())
    return f"https://{remote['host']}/{remote['path'].strip('/').removesuffix('.git')}" if remote else None


def on_config(config, **_):
    """Fill in the address, its name in the header, and the links to edit pages."""
    config["repo_url"] = config["repo_url"] or find_repository(Path(config["config_file_path"]).parent)
    if config["repo_url"]:
        config["repo_name"] = config["repo_name"] or config["repo_url"].partition("//")[2].partition("/")[2]
        config["edit_uri"] = config["edit_uri"] or "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, *, config, **_) -> str:
    """Write the address into a page's commands."""
    if not config["repo_url"]:
        return markdown
    return COMMENT.sub("", markdown).replace("git+REPOSITORY", f"git+{config['repo_url']}")
