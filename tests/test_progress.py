from thawline import progress


def test_where_there_is_no_terminal_a_line_is_printed_now_and_then(monkeypatch, capsys):
    now = iter([0.0, 5.0, 10.0, 10.0, 11.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))

    with progress.progress_bar("finetune", 2_000) as show:
        show(500)
        show(1_000)
        show(1_100)

    assert capsys.readouterr().err == "finetune: 1,000 of 2,000 (50%)\n"
