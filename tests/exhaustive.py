"""What `make test-exhaustive` runs and `make test-all` does not, each with the test that shows the same there.

A case is left out of `make test-all` where it costs seconds and another one runs the same lines of distwrap: on more
ranks than there are cores, under a launcher that comes again in other tests, or with another seed. Two files choose
by themselves: `accelerator/test_equality.py` and `faults/test_matrix.py`. A case is
only for this table if a test can be named beside it.
"""

from __future__ import annotations

# The beginning of a test's id, without `tests/`: what shows it in `make test-all`.
EXHAUSTIVE = {
    # On other machines and clusters.
    "clusters/test_hosts.py::test_a_process_is_a_machine[dlc]": "[by hand], and environments/ reads the variables",
    "clusters/test_hosts.py::test_a_process_is_a_machine[kubeflow]": "[by hand], and environments/ reads the variables",
    "clusters/test_hosts.py::test_a_wrong_interface[^lo": "the other two interfaces",
    "clusters/test_hosts.py::test_a_lost_host_is_told": "test_a_lost_host_zero_is_told",
    "clusters/test_hosts.py::test_a_link_that_is_cut_for_a_moment": "test_a_link_that_is_cut",
    "clusters/test_hosts.py::test_an_exception_crosses_hosts": "test_a_failure_under_torchrun_crosses_hosts",
    "clusters/test_hosts.py::test_torchrun": "test_a_failure_under_torchrun_crosses_hosts, which joins the same way",
    "clusters/test_elastic.py::test_failed_ranks_start_again[spawn]": "[auto]",
    "clusters/test_elastic.py::test_two_agents_of_torchrun_here": "test_under_torchrun",
    "clusters/test_elastic.py::test_when_no_restart_is_left": "launch/test_elastic.py, on one host",
    "clusters/test_slurm.py::test_two_nodes_and_four_tasks": "test_uneven_tasks",
    "clusters/test_slurm.py::test_a_batch_script_without_a_step": "test_a_batch_script_with_two_steps_at_once",
    "clusters/test_slurm_launcher.py::test_a_failure_comes_home[die while another computes": "[die-",
    "clusters/test_slurm_launcher.py::test_a_failure_comes_home[all die": "[die-",
    "clusters/test_slurm_launcher.py::test_a_job_of_one_rank": "test_a_call_comes_home_with_the_weights_of_one_process",
    "clusters/test_looking.py::test_by_the_launchers_number[Open MPI]": "[torchrun]",
    "clusters/test_looking.py::test_by_the_launchers_number[MPICH]": "[torchrun]",
    "clusters/test_looking.py::test_two_hosts_with_a_kernel_each": "test_two_hosts_of_one_kernel",
    "clusters/test_mpi.py::test_two_runs_of_two_ranks_here[mpich]": "test_mpich_over_two_hosts",
    "clusters/test_mpi.py::test_open_mpi_over_two_hosts": "[open_mpi], on one host",
    "clusters/test_secret.py::test_the_user_gives_one[trust]": "[a file]",
    "clusters/test_hosts.py::test_hosts_with_other_numbers_of_ranks": "clusters/test_slurm.py, by uneven tasks",
    "clusters/test_hosts.py::test_two_with_the_same_number": "launch/test_nodes.py::test_a_third_is_one_too_many",
    "clusters/test_bytes.py::test_what_we_count_is_what_leaves_the_host": "comm/test_bytes.py, by what DDP sends",
    "data/test_lockstep.py::test_preemption_under[torchrun-15]": "[torchrun-12]",
    "data/test_device_prefetch.py::test_copied_ahead_is_the_same[1 devices-False]": "[1 devices-True]",
    "engines/test_untouched.py::test_no_engine_is_imported_unless_it_is_chosen[spawn]": "[fork]",
    "test_equality.py::test_torchrun[4]": "[2]",
    "test_equality.py::test_script[4]": "[2]",
    "test_equality.py::test_processes_of_ours[spawn-4]": "[spawn-2]",
    # Engines.
    "engines/deepspeed/test_conformance.py::test_it_conforms[1-2]": "[2-2]",
    "engines/deepspeed/test_conformance.py::test_it_conforms[1-3]": "[2-2]",
    "engines/deepspeed/test_conformance.py::test_it_conforms[2-3]": "[2-2]",
    "engines/deepspeed/test_conformance.py::test_it_conforms[3-3]": "[3-2]",
    "engines/deepspeed/test_conformance.py::test_it_conforms_with_offload[1]": "[3]",
    "engines/deepspeed/test_conformance.py::test_it_conforms_with_offload[2]": "[3]",
    "engines/deepspeed/test_deepspeed.py::test_checkpoints_in_its_own_form[1]": "[2]",
    "engines/deepspeed/test_abilities.py::test_an_optimizer_on_nvme": "test_it_conforms_with_offload, in memory",
    "engines/deepspeed/test_abilities.py::test_weights_in_bfloat16_on_nvme": "test_it_conforms_with_offload, in memory",
    "engines/deepspeed/test_abilities.py::test_weights_in_float32_that_would": "test_a_missing_operator_is_told",
    "engines/hivemind/test_hivemind.py::test_loss_is_that_of_ddp[3-spawn]": "[2-fork]",
    "engines/ray/test_ray.py::test_a_loop_on_two_nodes_ends_with_the_weights_of_one_process[4]": "[2]",
    "engines/transformers/test_converted.py::test_the_converted_script_is_the_program[module_level]": "[basic]",
    "engines/transformers/test_converted.py::test_the_converted_script_is_the_program[windows]": "[basic]",
    "engines/transformers/test_transformers.py::test_each_trains_once[ways0-spawn]": "[ways0-forkserver]",
    "engines/transformers/test_transformers.py::test_each_trains_once[ways1-spawn]": "[ways1-forkserver]",
    "engines/transformers/test_transformers.py::test_each_trains_once[ways2-spawn]": "[ways2-forkserver]",
    # By each strategy, on more ranks and with more options.
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[ddp on": "[ddp]",
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[ddp2]": "[ddp], its code here",
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[zero1": "[zero2]",
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[fsdp on": "[fsdp]",
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[hsdp]": "[fsdp] and [fsdp+tp]",
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[pipeline on": "[pipeline]",
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[by hand, two": "[by hand]",
    "strategies/test_equality_of_strategies.py::test_it_trains_as_one_process_does[tp]": "[fsdp+tp]",
    "strategies/test_tensor_parallel.py::test_numbers_are_those_of_one_process[strategy3-4]": "[strategy2-4]",
    "strategies/test_tensor_parallel.py::test_numbers_are_those_of_one_process[strategy1-2]": "[strategy2-4]",
    "strategies/test_tensor_parallel.py::test_numbers_are_those_of_one_process[tp-3]": "[tp-2]",
    "strategies/test_tensor_parallel.py::test_states_masks_and_vocabularies[strategy1-4]": "[tp-2]",
    "strategies/test_fsdp.py::test_numbers_are_those_of_one_process[fsdp-3]": "[fsdp-2]",
    "strategies/test_fsdp.py::test_numbers_are_those_of_one_process[strategy2-4]": "test_it_conforms[hsdp, the heart]",
    "strategies/test_divided_changes.py::test_changes_of_parts_are_those_of_one_process[strategy3-4]": "[strategy4-4]",
    "strategies/test_conformance.py::test_it_conforms[ddp on one rank, the heart]": "every cell, whose suite has one",
    "strategies/test_conformance.py::test_it_conforms[auto in little memory, the heart]": "[fsdp, the heart]",
    "strategies/test_conformance.py::test_it_conforms[pipeline on three ranks, the heart]": "[pipeline, the heart]",
    "strategies/test_conformance.py::test_it_conforms[fsdp on three ranks, the heart]": "[fsdp, the heart]",
    "strategies/test_conformance.py::test_it_conforms[zero1 on three ranks, the heart]": "[zero1, the heart]",
    "comm/test_gradient_algorithms.py::test_like_the_reference_and_alike_on_all_ranks[3": "[4",
    "comm/test_gradient_algorithms.py::test_like_the_reference_and_alike_on_all_ranks[5": "[4",
    "comm/test_weight_algorithms.py::test_like_the_reference[5]": "[4]",
    # On pretended devices, what the CPU shows too.
    "accelerator/test_equality.py::test_exact_ways_are_one_process[None-4]": "[None-2]",
    "accelerator/test_equality.py::test_it_conforms[fsdp+tp, the heart]": "[fsdp, the heart] and [tp, the heart]",
    "accelerator/test_equality.py::test_it_conforms[hsdp, the heart]": "[fsdp, the heart]",
    "accelerator/test_equality.py::test_it_conforms[auto in little memory, the heart]": "[fsdp, the heart]",
    "accelerator/test_without_float64.py::test_the_suite[2 devices-ddp]": "[2 devices-zero2]",
    "accelerator/test_without_float64.py::test_the_suite[2 devices-pipeline]": "[2 devices-zero2]",
    "accelerator/test_without_float64.py::test_the_suite[2 devices-fsdp]": "[2 devices-zero2]",
    "accelerator/test_over_devices.py::test_two_nodes_of_two_devices": "launch/test_nodes.py, on CPUs",
    "accelerator/test_world.py::test_the_doctors_devices[4 devices]": "[1 devices]",
    "accelerator/test_attacked.py::test_asynchronous_averages_beside_collectives_of_the_loop[2 devices-F": "[…-True]",
    "notebooks/test_jupyter.py::test_after_a_device_was_used": "accelerator/test_world.py::test_a_fork_after_use",
    # Long trainings, large sizes and other seeds.
    "comm/test_training.py::test_digits[1]": "[0]",
    "comm/test_training.py::test_digits[2]": "[0]",
    "comm/test_training.py::test_language_model": "test_digits",
    "guarded/test_scale.py::test_128_ranks": "faults/test_scale.py::test_64_ranks",
    "guarded/test_scale.py::test_a_result_of_two_gigabytes": "launch/test_transport.py, with hundreds of megabytes",
    "guarded/test_soak.py::test_a_long_training_takes_no_more_and_more": "faults/test_scale.py::test_launches_in_a_row",
    "convert/test_peers.py::test_nothing_is_done_or_found_twice[imagenet]": "the smaller programs",
    "test_packaging.py::test_a_release_is_the_same_each_time": "`make check`, which builds one",
    "test_packaging.py::test_tests_run_from_it": "test_everything_of_the_repository_is_in_it",
    # Benchmarks that `make bench` runs: that they run.
    "test_benchmarks.py::test_launch": "test_step, by the same tools",
    "test_benchmarks.py::test_imports": "test_step, by the same tools",
    "test_benchmarks.py::test_data": "test_step, by the same tools",
    "test_benchmarks.py::test_clusters": "clusters/, which runs the same script",
    "test_benchmarks.py::test_sharded": "test_step",
    "test_benchmarks.py::test_slow_loops": "docs/test_notebooks.py[why_slow]",
    "test_benchmarks.py::test_engines": "test_step",
    "test_benchmarks.py::test_report": "test_step",
    "test_benchmarks.py::test_slow_link": "docs/test_pages.py[docs/howto/slow_links.md]",
}


def reason(nodeid: str) -> str | None:
    """Return why a test is for `make test-exhaustive` alone, or ``None``."""
    begin = begin_of(nodeid)
    return None if begin is None else f"{EXHAUSTIVE[begin]} shows it"


def begin_of(nodeid: str) -> str | None:
    """Return the beginning of a test's id that is in the table, or ``None``."""
    within = nodeid.removeprefix("tests/")
    return next((begin for begin in EXHAUSTIVE if within.startswith(begin)), None)
