"""What all panels share."""

from matplotlib.figure import Figure

from trl_a3po.report.chart_style import write_end_labels


def test_lines_that_end_in_one_place_share_their_label_and_others_do_not_overlap():
    axes = Figure().add_subplot()
    axes.set_ylim(0, 1)
    write_end_labels(
        axes, 1.0, [("0.59", 0.59, "red"), ("0.59", 0.591, "blue"), ("0.60", 0.6, "green"), ("0.1", 0.1, "red")], 9
    )
    words = {text.get_text(): text.xy[1] for text in axes.texts}
    assert sorted(words) == ["0.1", "0.59", "0.60"]
    assert words["0.60"] - words["0.59"] > 0.1
