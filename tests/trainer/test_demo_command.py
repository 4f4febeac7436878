"""`vramwise demo` without options starts: its defaults pass its own bounds."""

from app.cli import main
from planner.errors import VramwiseError


def test_demo_needs_no_option(monkeypatch, capsys):
    asked = {}

    def start(**options):
        asked.update(options)
        raise VramwiseError("started")

    monkeypatch.setattr("trainer.demo.run_demo", start)
    assert main(["demo"]) == 1
    assert "error: started" in capsys.readouterr().err
    assert asked["steps"] is None
    assert main(["demo", "--steps", "3"]) == 2
