"""Start-up: facts of a launch in, problems out; what is decided from them.

decisions             gathers the facts, asks the checks, and says which worker runs the launch
facts                 what the checks are given, and the form of a problem
device_check          whether there is a device, before anything else
launch_checks         settings that have to have one value, whatever the draft is
serving_checks        flags that concern the draft, alone and beside it
quantisation_checks   a quantised draft, and flags that quantise one
fit_checks            all that has to fit between draft, target and server; asks the next two as well
tensor_checks         the draft's files and tensors
vocabulary_checks     its embedding, head, vocabulary and mask row, and a token map
mtp_checks            all of these where the target's own layers are the draft
target_class          which class of SGLang serves the target
fp8_drafts, draft_kv, copying   whether a draft is read in fp8, keeps rings, proposes copies
"""
