"""The default output of a run: plain lines on standard error."""

from axlearn_core.train.trackers import LinesTracker


def test_lines_show_every_value_without_terminal_control_codes(capsys):
    tracker = LinesTracker.Config().build(run_dir="unused")
    tracker.start({"max_steps": 400})
    tracker.log(10, {"loss": 7.62512, "tokens_per_second": 8012.3})
    tracker.log(10, {"eval_loss": float("nan")})
    tracker.text(10, "sample", "a\x1b[2Jb")
    tracker.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 10/400  loss 7.625  tokens_per_second 8012",
        "step 10/400  eval_loss nan",
        "sample at step 10:",
        "a\N{REPLACEMENT CHARACTER}[2Jb",
    ]
