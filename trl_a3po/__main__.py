"""`python -m trl_a3po …` is `trl-a3po …`, so that `accelerate launch -m trl_a3po train recipe.yaml` works."""

from trl_a3po.cli.main import main

if __name__ == "__main__":
    main()
