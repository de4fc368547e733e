"""Which frames of a traceback are the user's."""

from trl_a3po.rewards.users_frames import PACKAGE, users_frames


def raised_in(file):
    """The traceback of an error in a function whose code is in `file`."""
    try:
        exec(compile("[][0]", file, "exec"))
    except IndexError as error:
        return error.__traceback__.tb_next


def test_frames_of_this_package_are_left_out():
    assert users_frames(raised_in(PACKAGE + "trainer.py")) is None


def test_a_folder_whose_name_begins_like_the_packages_is_the_users():
    trace = raised_in(PACKAGE.rstrip("/") + "_experiments/train.py")
    assert users_frames(trace) is trace
