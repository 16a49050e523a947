"""What a program keeps for long although nothing told that it would."""

from programs.step_program import MIB, Program

from stalloc.runtime.paged_arena import move


def test_small_blocks_that_are_kept_step_after_step_do_not_keep_a_page_each() -> None:
    """The arena moves away from each of them; 274 MiB are held in the end where that goes on."""
    program, kept = Program(), 0

    def train(*, keeps: bool) -> None:
        first = program.allocate(300 * 1024)
        live = [program.allocate(3 * MIB + 4096 * i) for i in range(20)]
        if keeps:
            assert move(program.controller.arenas)
        for address in live:
            program.free(address)
        if not keeps:
            program.free(first)

    for _ in range(8):
        program.step(lambda: train(keeps=False))
    for _ in range(100):
        served = program.step(lambda: train(keeps=True))
        kept += 300 * 1024
    assert program.state.record.total.allocated_bytes > kept
    assert program.state.record.reserved_bytes < 200 * MIB
    assert served == (20, 1)
