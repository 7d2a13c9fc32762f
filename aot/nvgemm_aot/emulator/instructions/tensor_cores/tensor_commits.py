"""Completion of tensor cores' work (PTX ISA, "tcgen05.commit", "tcgen05.fence")."""

from __future__ import annotations

from ...emulation_errors import EmulationError
from ...machine.hierarchy import Warp
from ...machine.lanes import Mask
from ...machine.scheduler import Step
from ...ptx.program import Instruction, Program
from ..decoders import Qualifiers, decodes
from ..shared_addresses import active_lanes, locate, shared_address
from ..values import read
from .tensor_allocation import CTA_GROUPS
from .work_queue import commit


@decodes("tcgen05.commit")
def _commit(instruction: Instruction, program: Program) -> Step:
    qualifiers = Qualifiers(instruction)
    qualifiers.one_of("commit")
    qualifiers.one_of(*CTA_GROUPS)
    qualifiers.one_of("mbarrier::arrive::one")
    generic = not qualifiers.flag("shared::cluster")
    multicast = qualifiers.flag("multicast::cluster")
    qualifiers.one_of("b64")
    qualifiers.end()
    if len(instruction.operands) != 1 + multicast:
        raise instruction.unknown(f"a number of {len(instruction.operands)} operands")
    place = shared_address(instruction.operands[0], instruction, program, generic=generic)
    ranks = read(instruction.operands[1], "u16", instruction, program) if multicast else None

    def step(warp: Warp, mask: Mask) -> None:
        for lane in active_lanes(mask):
            block, offset = locate(warp, place(warp, lane))
            if ranks is None:
                commit(warp, instruction, [(block, offset)])
                continue
            chosen = int(ranks(warp)[lane])
            peers = block.cluster.blocks
            if chosen == 0 or chosen >> len(peers):
                raise EmulationError(f"signals blocks {chosen:#b} of a cluster of {len(peers)}")
            chosen_blocks = [peer for peer in peers if chosen >> peer.rank & 1]
            commit(warp, instruction, [(peer, offset) for peer in chosen_blocks])

    return step


@decodes("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(instruction: Instruction, program: Program) -> Step:
    """Decodes fences of the order between tensor memory's accesses and threads' synchronisation.

    They order nothing here: `races` takes waits for accesses to be enough, since PTX as NVVM makes
    it for `cutlass.operators` and quack has no such fence.
    """
    if len(instruction.qualifiers) != 1 or instruction.operands:
        raise instruction.unknown("a qualifier or operand")

    def step(warp: Warp, mask: Mask) -> None:
        pass

    return step
