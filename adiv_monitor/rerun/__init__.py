"""What ran in a step is run again, unseen by the run.

There is one way. What a call depends on besides its inputs and parameters is noted when it is made
(`Surroundings`); it runs within `untouched`, after which all is as if nothing had run: the very
modules that ran, where whole forward passes are repeated, or a `Twin` of one module, which is a
function of its parameters. How what such a function gives moves with the parameters: `jvp`.
"""
