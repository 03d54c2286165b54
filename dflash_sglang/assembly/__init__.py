"""Builds the worker's parts from a launch, in the order in which SGLang has what they need.

loading.load_draft        the target is loaded; KV pools are not sized yet
loading.bind_pools        request table and KV pools exist
steps.build_step          the same
steps.check_attention     attention backends exist
steps.add_widths          graphs of whole blocks exist
steps.build_controller    graphs of every width exist
"""
