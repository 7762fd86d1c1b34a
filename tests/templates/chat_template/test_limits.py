"""Limits of memory and CPU time for chat templates, in a separate process."""

import json

import pytest
from megaswift.templates.chat_template import limits
from megaswift.templates.chat_template.limits import exceeded_limit

CONTEXT = json.dumps({"messages": [{"role": "user", "content": "hello"}]})


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% generation %}{{ messages | tojson }}{% endgeneration %}",
        "{{ raise_exception('no') }}",  # what it says against these messages is not the limits' matter
        "{{ messages",
    ],
)
def test_a_template_within_the_limits(template):
    assert exceeded_limit(template, CONTEXT) is None


def test_a_text_without_bound():
    assert exceeded_limit("{{ messages[0].content * 10**10 }}", CONTEXT) == "it needs more than 2 GiB of memory"


def test_loops_without_bound(monkeypatch):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(limits, "SECONDS", 1)
    assert exceeded_limit(loops, CONTEXT) == "it takes longer than 1 s"
