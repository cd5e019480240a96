"""The roles of a run: prompt, rollout, reward, reference, advantage, trainer; one package each."""
