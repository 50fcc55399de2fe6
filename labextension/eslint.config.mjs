import js from '@eslint/js';
import prettier from 'eslint-config-prettier/flat';
import globals from 'globals';
import tseslint from 'typescript-eslint';

export default tseslint.config(
  { ignores: ['lib/', 'node_modules/'] },
  js.configs.recommended,
  {
    rules: {
      curly: ['error', 'all'],
      eqeqeq: 'error',
      'no-unneeded-ternary': 'error',
      'prefer-arrow-callback': 'error'
    }
  },
  {
    files: ['src/**/*.ts'],
    extends: [tseslint.configs.strictTypeChecked, tseslint.configs.stylisticTypeChecked],
    languageOptions: {
      globals: globals.browser,
      parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname }
    },
    rules: {
      '@typescript-eslint/no-confusing-void-expression': ['error', { ignoreArrowShorthand: true }],
      '@typescript-eslint/restrict-template-expressions': ['error', { allowNumber: true }],
      // It knows nothing of indices out of range, and calls their checks unnecessary.
      '@typescript-eslint/no-unnecessary-condition': 'off',
      // The convention of JupyterLab's own packages.
      '@typescript-eslint/naming-convention': [
        'error',
        { selector: 'interface', format: ['PascalCase'], custom: { regex: '^I[A-Z]', match: true } }
      ]
    }
  },
  {
    files: ['**/*.mjs', 'style/*.js'],
    languageOptions: { globals: globals.node }
  },
  prettier
);
