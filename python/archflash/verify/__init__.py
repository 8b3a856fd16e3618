"""`archflash verify`: which kernels are right on this machine's GPU. It needs the wheel only.

`_jobs` lists what is tried: `_probes`; `_calls`, compared with float64 by `_checks`; and `_times`.
`_run` gives each job a process of its own (`_worker`), with limits. `_verdict` says what that
proves, and writes the archive. The proof is kept by `archflash._proofs`.
"""
