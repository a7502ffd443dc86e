"""Facts of this machine (`machine.probe_machine`) and peaks of many (`peaks.find_device`), without torch."""
