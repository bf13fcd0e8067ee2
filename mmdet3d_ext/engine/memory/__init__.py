"""How much GPU memory training needs: predicted without a GPU, and explained when there was too little."""
