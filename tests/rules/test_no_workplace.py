"""Nothing in the repository points at the machine it was written on, or at a package registry."""

import re

from rules.repository import files_below, name_of

# Put together, so that this file does not break its own rule.
FOLDERS = ["work", "tmp", "root", "home", "Users", "mnt", "data", "opt"]
PATHS = re.compile(r"(?<![\w.}$)/<>:-])/(" + "|".join(FOLDERS) + r")/\w")
HOSTS = re.compile("|".join(["py" + r"pi\.org", "python" + "hosted", r"proxy\.golang" + r"\.org"]))

FILES = [path for path in files_below() if path.suffix not in (".png", ".safetensors")]


def test_no_machine_and_no_package_registry_is_named():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert [match.group() for match in PATHS.finditer(text)] == [], name_of(path)
        assert HOSTS.search(text) is None, name_of(path)


def test_paths_and_hosts_are_found():
    assert PATHS.search('open("/' + 'work/main/x")') and PATHS.search(" /" + "tmp/w/venv")
    assert not PATHS.search("train/data/x") and not PATHS.search("https://github.com/a/work/b")
    assert HOSTS.search("https://files.python" + "hosted.org/packages")
