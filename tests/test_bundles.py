"""The reader of TPU programs counts the operations issued, here by a program short enough to count by hand."""

import numpy as np

from benchmarks import _bundles as bundles

# Four iterations of a loop; the inner region is skipped where the table has a 0. A branch has two delay slots.
PROGRAM = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = smov.u32 [#allocation2]  ;;  %s9_s5 = inlined_call_operand.hbm [shape: s32[1,4], index: 0] }
   0x1   :  { %2 = dma.hbm_to_smem /*hbm=*/%s9_s5, /*size_in_granules=*/16, /*smem=*/%s1_s0, [#allocation1] }
   0x2   :  { %s3_s1 = smov.u32 0 /* copy for cssa */ }
   0x3 LB: > { %s5_s2 = sadd.s32 1, %s4_s1  ;;  %s4_s1 = sphi %s3_s1, %s5_s2 } /* Start region 3 */
   0x4   : > { %s6_s3 = sld [smem:[#allocation2 + %s4_s1]]  ;;  %10 = sst [smem:[#allocation7_spill]] %s5_s2 }
   0x5   : > { %p7_p0 = scmp.eq.s32.totalorder %s6_s3, 0 }
   0x6   : > { %11 = sbr.rel (%p7_p0) target = $region8 }
   0x7   : > { %12 = dma.hbm_to_vmem [thread:$0]  (!%p7_p0), %s9_s5, 64, %s1_s0, [#allocation1] /*
base_bounds: (4, 1) */ }
   0x8   :  {}
   0x9   : > { %v13_v0 = vadd.f32 %v13_v0, %v13_v0 } /* Start region 7 :: End region 7 */
   0xa   : > { %v14_v0 = vadd.f32 %v13_v0, %v13_v0 }
   0xb PF: > { %s15_s4 = sld [smem:[#allocation7_spill]] } /* Start/End empty region 8 */
   0xc   : > { %p16_p1 = scmp.ge.s32.totalorder %s15_s4, 4 }
   0xd   :  { %17 = sbr.rel (!%p16_p1) target = $region3 }
   0xe   :  {}
   0xf   :  {}
  0x10   :  { %18 = vsyncpa [#allocation1], 1 }
"""
UTILIZATION = """== CAPACTIY:
VALU, SALU
    4     2
== UTILIZATION:
""" + "\n".join(f"{int(at in (9, 10))} 1" for at in range(17))


def test_what_a_program_issues():
    issued = bundles.execute(PROGRAM, UTILIZATION, [np.array([[5, 0, 0, 7]], np.int32)], delay=2)
    assert issued.bundles == 3 + 4 * 11 + 2 * 2 + 1
    assert issued.instructions == {"VALU": 2 * 2, "SALU": issued.bundles}
    assert issued.copied == 2 * 64 * 32
    assert issued.capacity == {"VALU": 4, "SALU": 2}


def test_small_integers_share_words():
    table = np.arange(10, dtype=np.int8).reshape(5, 2) - 1
    words = bundles._words(table)
    byte = lambda row, column: words[row // 4 * 128 + column] >> 8 * (row % 4) & 0xFF
    assert [byte(*at) for at in np.ndindex(5, 2)] == [n & 0xFF for n in table.ravel().tolist()]
    assert len(words) == 2 * 128
