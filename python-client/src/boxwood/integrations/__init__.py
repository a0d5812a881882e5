"""Adapters to agents and harnesses. Each needs its own project and is imported by its own name.

- `boxwood.integrations.mini_swe_agent`: an environment of mini-swe-agent.
- `boxwood.integrations.swe_rex`: a deployment and a runtime of SWE-ReX (SWE-agent).
- `boxwood.integrations.harbor`: an environment of Harbor (terminal-bench).
- `boxwood.integrations.trl`: environments and a branching rollout function of TRL.
- `boxwood.integrations.verl`: a branching agent loop of verl.
- `boxwood.integrations.skyrl`: a branching generator of SkyRL.
"""
