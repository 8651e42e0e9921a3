"""The Makefile names tests and targets that exist."""

import re

from tests.contracts.source_tree import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def test_what_the_fast_tests_leave_out_exists() -> None:
    slow = re.findall(r"^SLOW := (.*?)\n\n", MAKEFILE, re.MULTILINE | re.DOTALL)[0].replace("\\\n", " ").split()
    assert len(slow) > 5
    for path, _, test in (one.partition("::") for one in slow):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test


def test_every_target_that_is_no_file_is_phony_and_explained() -> None:
    phony = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
    assert phony == set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE))
