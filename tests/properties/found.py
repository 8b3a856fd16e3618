"""Problems that have failed, each with what was wrong: of the code, or of how it was judged."""

from __future__ import annotations

from tests.properties.drawing import Problem

FOUND = [
    # NaN where the forward pass had an infinite sink.
    Problem(
        "attention_backward", 368,
        {"dtype": "bfloat16", "dims": (64, 64), "heads": (2, 1), "batch": 1, "nq": 3, "nk": 1,
         "options": {"sinks": "infinite"}, "strides": ("dense", "dense", "dense"),
         "mask_gradient": False, "dlse": False},
    ),
    # A sink of -inf had a gradient where no key is seen.
    *(
        Problem(
            entry, 660,
            {"dtype": "float16", "dims": (16, 16), "heads": (2, 2), "batch": 1, "nq": 5, "nk": 0,
             "options": {"sinks": "infinite"}, "strides": ("dense", "dense", "dense"),
             "mask_gradient": False, "dlse": True},
        )
        for entry in ("attention_backward", "autograd")
    ),
    # The error rule of int8 did not take calls without rows.
    Problem(
        "attention", 786,
        {"dtype": "bfloat16", "dims": (16, 16), "heads": (1, 1), "batch": 0, "nq": 0, "nk": 33,
         "options": {"approximate": "int8_qk"}, "strides": ("dense", "dense", "dense"), "pad": 0},
    ),
    # cuDNN refused the output that PyTorch had laid out by the strides of q.
    Problem(
        "attention", 256,
        {"dtype": "bfloat16", "dims": (64, 128), "heads": (2, 2), "batch": 2, "nq": 3, "nk": 128,
         "options": {"window": (None, 64), "block_mask": {"kind": "int8", "ones": (True, False)}},
         "strides": ("one batch", "dense", "transposed"), "pad": 0},
    ),
    # The fault of the problem above, in a call that goes to PyTorch before its options are read.
    Problem(
        "scaled_dot_product_attention", 997,
        {"dtype": "float16", "dims": (40, 72), "heads": (5, 1), "batch": 2, "nq": 130, "nk": 3,
         "strides": ("one row", "dense", "dense"), "options": {"scale": 0.03}},
    ),
    # Judged without what rounding costs: keys that are all the same, whose dq cancels to 0;
    Problem(
        "autograd", 533,
        {"dtype": "bfloat16", "dims": (256, 256), "heads": (2, 2), "batch": 1, "nq": 16, "nk": 2,
         "options": {}, "strides": ("dense", "offset, one row", "dense"), "mask_gradient": False,
         "dlse": False},
    ),
    # and a log-sum-exp of -300 or so, whose last bit is 3e-5.
    Problem(
        "attention_backward", 707,
        {"dtype": "float32", "dims": (128, 128), "heads": (6, 3), "batch": 3, "nq": 2, "nk": 1,
         "options": {"alibi_slopes": "batch", "q_offset": 300, "layout": "bnhd"},
         "strides": ("offset, one row", "dense", "dense"), "mask_gradient": False, "dlse": False,
         "accumulate": 0.0},
    ),
    # Rows that FlashMask hides were seen, if its second pair of bounds lay behind the first.
    Problem(
        "masks", 260,
        {"name": "from_flashmask", "nq": 3, "nk": 3, "batch": 2, "number": 5, "causal": False},
    ),
    # Judged without slack, where a softcap lets the log-sum-exp be 0.1 but 576 products that cancel
    # add up to 254: half of float32's last bit there is 1.5e-5. In the second one hopper was right,
    # and in the first one ampere.
    Problem(
        "key_lists", 106,
        {"kind": "latent rows", "lengths": (0, 2),
         "made": {"nq": 8, "heads": (16, 1), "d": 64, "dv": 512, "qv": True, "capacity": 3,
                  "dtype": "bfloat16", "page_size": 64},
         "options": {"window": (3, 3), "softcap": 1.0, "scale": 1,
                     "key_indices": {"ones": (False, True), "blocks": False, "count": 15,
                                     "lengths": True, "twice": False}},
         "packed_rows": "fp8_584", "physical": False},
    ),
    Problem(
        "key_lists", 0,
        {"kind": "latent rows", "lengths": (53, 104),
         "made": {"nq": 70, "heads": (1, 1), "d": 64, "dv": 512, "qv": True, "capacity": 129,
                  "dtype": "bfloat16", "page_size": 7},
         "options": {"causal": True, "window": (0, 1), "softcap": 1.0, "scale": 1,
                     "key_indices": {"ones": (False, True), "blocks": False, "count": 224,
                                     "lengths": False, "twice": False}},
         "packed_rows": "fp8_584", "physical": False},
    ),
]  # fmt: skip
