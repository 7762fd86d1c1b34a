"""SECURITY.md says nothing that no test holds: its sentences, each with the tests of it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FUZZ, INPUT, LAUNCH = "test_fuzz.py", "tasks/rollout/test_server_input.py", "cli/test_launch.py"
STARTED = "cli/test_rollout_servers.py::test_servers_have_a_key_of_their_run_and_end_with_it"
IMAGES, VIDEOS = "tasks/rollout/test_image_requests.py", "tasks/rollout/test_video_requests.py"
SERVER, KEYS = "tasks/rollout/test_server.py", "tasks/rollout/test_keys.py"

# Words of SECURITY.md: the tests that hold them.
HELD = {
    "`auto_map` code of configs, tokenizers and models never runs and never asks": [
        "bridge/checkpoint/test_pretrained.py::test_code_of_a_folder_never_runs",
        "bridge/checkpoint/test_pretrained.py::test_all_of_transformers_loading_is_in_one_place",
    ],
    "pickled weights are refused": ["bridge/checkpoint/test_pretrained.py::test_a_folder_of_pickles_is_refused"],
    "chat templates render in a sandbox with 2 GiB and 10 s of CPU": [
        "templates/chat_template/test_limits.py::test_a_text_without_bound",
        "templates/chat_template/test_limits.py::test_loops_without_bound",
    ],
    "a header of safetensors over 100 MB": ["bridge/checkpoint/test_safetensors_io.py::test_a_header_without_end"],
    "wrong offsets": [f"{FUZZ}::test_headers_of_safetensors"],
    "an index that leaves its folder": [
        "bridge/checkpoint/test_safetensors_io.py::test_an_index_that_leaves_its_folder",
        f"{FUZZ}::test_indexes",
    ],
    "the `.metadata` pickle may name nothing but the classes of its format": [
        "bridge/checkpoint/test_pickles.py::test_nothing_that_a_stranger_names_is_called",
        f"{FUZZ}::test_metadata_pickles",
    ],
    "all other state is read by `weights_only`": ["bridge/checkpoint/test_pickles.py::test_common_state_runs_no_code"],
    "rows are data": [f"{FUZZ}::test_rows"],
    "answers are compared in processes with limits of time and memory": [
        "tasks/rewards/test_functions.py::test_answers_that_cannot_be_computed_are_wrong_and_cost_seconds"
    ],
    "start processes, open files for writing or change them, connect, signal other processes": [
        "tasks/rewards/rules/test_sandbox.py::test_programs_do_no_harm"
    ],
    "take more than 2 GiB or 5 s of CPU": [
        "tasks/rewards/rules/test_sandbox.py::test_programs_do_no_harm",
        "tasks/rewards/rules/test_sandbox.py::test_an_endless_loop_ends",
    ],
    "without a system-call filter no program runs": [
        "tasks/rewards/rules/test_sandbox.py::test_a_machine_without_limits_is_an_error"
    ],
    "read files, or get anything without the key": [
        f"{INPUT}::test_no_file_is_read_by_a_claim",
        f"{INPUT}::test_weights_come_from_the_memory_of_the_run_alone",
        f"{SERVER}::test_the_api_key",
        f"{FUZZ}::test_routes",
        f"{SERVER}::test_readiness_and_metrics",
    ],
    "Images and frames of videos in requests are decoded before the engine gets them": [
        f"{IMAGES}::test_bad_images_have_a_reason",
        f"{IMAGES}::test_images_of_a_body_are_bounded",
        f"{VIDEOS}::test_videos_of_a_body_are_bounded",
    ],
    "Files of videos are not taken": [f"{VIDEOS}::test_bad_videos_have_a_reason"],
    "A `url` is fetched from public addresses only": [f"{IMAGES}::test_bad_images_have_a_reason"],
    "requests with an `Origin`, or for another name than the server's, are refused": [
        f"{INPUT}::test_pages_in_a_browser_are_refused"
    ],
    "read keys and tokens in the list of processes": [
        f"{LAUNCH}::test_others_on_the_machine_see_no_key_and_no_port",
        f"{LAUNCH}::test_tokens_and_keys_reach_the_processes_by_the_environment",
    ],
    "reach the store of a run on one node": [f"{LAUNCH}::test_others_on_the_machine_see_no_key_and_no_port"],
    "or read the server's key": [
        f"{KEYS}::test_a_file_that_others_can_use_is_refused",
        f"{KEYS}::test_another_account_does_not_read_it",
    ],
    "replace a Python module of the run": [f"{LAUNCH}::test_others_on_the_machine_see_no_key_and_no_port"],
    "It listens on 127.0.0.1": [f"{INPUT}::test_names_of_a_server"],
    "needs the key": [f"{SERVER}::test_the_api_key", f"{SERVER}::test_readiness_and_metrics"],
    "have a new key each time, by the environment": [STARTED],
    "They listen on 127.0.0.1": [STARTED],
    "which the first server makes with mode 0600 and prints": [
        f"{KEYS}::test_a_server_makes_a_key_once_and_runs_of_its_user_find_it"
    ],
    "Runs of the same user find it there": [
        f"{KEYS}::test_a_server_makes_a_key_once_and_runs_of_its_user_find_it",
        f"{KEYS}::test_the_flag_and_the_variable_come_first",
        f"{KEYS}::test_a_key_is_sent_to_no_server_of_others",
    ],
    "Only the run that has claimed the server sends weights": [
        f"{SERVER}::test_only_the_run_that_claimed_it_changes_weights"
    ],
    "and from no file": [f"{INPUT}::test_no_file_is_read_by_a_claim"],
    "A body has at most 256 MiB": [f"{INPUT}::test_a_body_that_is_too_large"],
    "headers come within 10 s": [f"{INPUT}::test_half_requests_do_not_stop_the_server"],
    "a request whose client has gone is cancelled": [f"{INPUT}::test_a_request_whose_client_has_gone_is_given_up"],
    "in no file of the run": [
        "cli/test_console.py::test_what_ends_a_run_is_in_its_log",
        "cli/test_flags.py::test_saved_arguments_can_be_given_back",
    ],
    "get them by the environment": [f"{LAUNCH}::test_tokens_and_keys_reach_the_processes_by_the_environment"],
}

# Advice to the reader, and limits: nothing to hold.
ADVICE = ("There is no TLS", "Your own command line stays visible")


def test_every_promise_has_its_tests() -> None:
    document = (ROOT / "SECURITY.md").read_text()
    text = " ".join(document.split())
    assert not [words for words in HELD if words not in text]
    table, server, secrets = re.findall(
        r"\n## (?:Not trusted|The rollout server|Secrets)\n(.*?)(?=\n## |\Z)", document, re.S
    )
    rows = [re.sub(r"^\|[^|]*\|", "", row) for row in table.strip().splitlines()[2:]]
    promises = [promise for row in rows for promise in re.split(r"; (?!answers)", row)]
    bullets = [" ".join(bullet.split()) for bullet in re.split(r"^- ", server + secrets, flags=re.M) if bullet.strip()]
    promises += [sentence for bullet in bullets for sentence in re.split(r"(?<=\.) (?=[A-Z])", bullet)]
    assert len(promises) > 20
    held = (*HELD, *ADVICE)
    assert not [promise for promise in promises if not any(words in promise for words in held)]


@pytest.mark.parametrize("name", sorted({name for names in HELD.values() for name in names}))
def test_the_tests_are_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
